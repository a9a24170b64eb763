// The ids of words: remembered, put together of parts that are remembered, or found in the vocabulary.
#pragma once

#include <array>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "pieces.h"
#include "rules.h"
#include "word_cache.h"

constexpr size_t kLookedUpTogether = 16;  // words; their places in the cache are loaded at the same time
constexpr char kCombines = '\xfe';        // no byte of UTF-8, and no other one of Key
constexpr char kContinues = '\xfd';       // likewise

// The first byte in [at, end) that is not printable ASCII. Eight bytes are tested at a time: a byte below 0x21 borrows
// into its highest bit, one above 0x7e carries into it. Only bits above the lowest one can be wrong.
inline const Byte* plain_end(const Byte* at, const Byte* end) {
  constexpr uint64_t ones = 0x0101010101010101, high = 0x8080808080808080;
  for (; end - at >= 8; at += 8) {
    const uint64_t bytes = load(at, 8, end);
    const uint64_t other = (((bytes - 0x21 * ones) & ~bytes) | bytes | (bytes + ones)) & high;
    if (other) return at + __builtin_ctzll(other) / 8;
  }
  while (at < end && *at > ' ' && *at < 0x7f) at++;
  return at;
}

// The ids of the words of texts in which no characters may combine. A vocabulary's ids have to fit into Id.
template <typename Id>
class Words {
 public:
  Words(Pieces::Numbered pieces, const std::vector<int32_t>& costs, int32_t unknown_cost, std::string_view table,
        size_t cache_bytes)
      : cache(cache_bytes), pieces_(std::move(pieces), costs, unknown_cost), rules_(table) {
    if (costs.size() - 1 > std::numeric_limits<Id>::max()) throw std::invalid_argument("ids are too large");
    marked_.reserve(2 * kLongestWord);
    for (size_t byte = 1; byte < singles_.size(); byte++) {
      const char character = char(byte);
      singles_[byte].second = pieces_.cheapest({&character, 1}, &singles_[byte].first).quarter_nats;
    }
  }

  // Returns the ids of a word, a null pointer if it is too long when it is normalised. They stay where they are until
  // the next call.
  Segmented<Id> segment(const Key& key) {
    if (const auto found = cache.find(key); found.ids) return found;
    Segmented<Id> segmented{ids_.data()};
    const auto* begin = reinterpret_cast<const Byte*>(key.word.data());
    if (plain_end(begin, begin + key.word.size()) == begin + key.word.size()) {
      segmented = by_parts(key.word, ids_.data());
    } else {
      rules_.normalise(key.word, normalised_);
      if (normalised_.size() > kLongestWord) return {};
      if (!normalised_.empty()) segmented = pieces_.cheapest(normalised_.insert(0, 1, ' '), ids_.data());
    }
    cache.insert(key, segmented);
    return segmented;
  }

  WordCache<Id> cache;

 private:
  // A part of a word: a single character behind others, or what is looked up in the cache.
  struct Part {
    Byte single = 0;
    Key key;
    std::string_view text;
  };

  // The ids of the parts of a word so far.
  struct Joined {
    Id* ids;
    size_t count = 0;
    uint32_t quarter_nats = 0;
  };

  // Returns the ids of a word of printable ASCII that is not in the cache. Its parts often are: paths, code and words
  // with punctuation are new in ever new combinations, but what they consist of is not.
  Segmented<Id> by_parts(std::string_view word, Id* ids) {
    if (pieces_.part_end(word, 0) == word.size()) return pieces_.cheapest(marked_.assign(1, ' ').append(word), ids);
    size_t num_parts = 0;
    Joined joined{ids};
    marked_.clear();
    for (size_t start = 0, end = 0; start < word.size(); start = end) {
      end = pieces_.part_end(word, start);
      if (start > 0 && end == start + 1) {
        parts_[num_parts++].single = Byte(word[start]);
      } else {
        mark_part(word.substr(start, end - start), start == 0, parts_[num_parts]);
        cache.prefetch(parts_[num_parts++].key);
      }
      if (num_parts < parts_.size() && end < word.size()) continue;
      for (size_t at = 0; at < num_parts; at++) append_part(parts_[at], joined);
      num_parts = 0;
    }
    return {ids, uint16_t(joined.count), uint16_t(std::min<uint32_t>(joined.quarter_nats, UINT16_MAX))};
  }

  // The first part is remembered as the word that it would be alone, others with a mark in place of its space.
  void mark_part(std::string_view part, bool is_first, Part& marked) {
    const char* name = marked_.data() + marked_.size();
    marked_ += is_first ? ' ' : kContinues;
    marked_ += part;
    const std::string_view with_mark(name, part.size() + 1), without(name + 1, part.size());
    const auto* end = reinterpret_cast<const Byte*>(name + 1 + part.size());
    marked.single = 0;
    marked.key.assign(is_first ? without : with_mark, end, false);
    marked.text = is_first ? with_mark : without;
  }

  void append_part(const Part& part, Joined& joined) {
    Id* to = joined.ids + joined.count;
    Segmented<Id> found;
    if (part.single) {
      found = {&singles_[part.single].first, 1, singles_[part.single].second};
    } else {
      found = cache.find(part.key);
      if (!found.ids) cache.insert(part.key, found = pieces_.cheapest(part.text, to));
    }
    const bool continues_unknown = joined.count && to[-1] == kUnknown && found.ids[0] == kUnknown;
    const size_t count = found.count - continues_unknown;
    if (found.ids + continues_unknown != to) std::memmove(to, found.ids + continues_unknown, count * sizeof(Id));
    joined.count += count;
    joined.quarter_nats += found.quarter_nats;
  }

  Pieces pieces_;
  Rules rules_;
  std::array<std::pair<Id, uint16_t>, 0x80> singles_{};  // ids and costs of characters of ASCII
  std::array<Id, kLongestWord + 1> ids_;
  std::array<Part, kLookedUpTogether> parts_;
  std::string normalised_;
  std::string marked_;  // the parts of a word, each with a mark in front
};
