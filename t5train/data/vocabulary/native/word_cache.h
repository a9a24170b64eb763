// Remembers the ids of words, within a bound of memory.
#pragma once

#include <utility>

#include "word.h"

// A word as the cache compares it: up to 16 bytes are two numbers. Of longer ones, the first number is the hash.
struct Key {
  std::string_view word;
  uint64_t low = 0, high = 0, hash = 0;
  bool is_long = false;

  Key() = default;
  // Bytes before `readable` can be read. Words with zeros are handled as long ones, as zeros end short ones.
  Key(std::string_view bytes, const Byte* readable, bool has_zeros) : word(bytes) {
    const auto* at = reinterpret_cast<const Byte*>(word.data());
    is_long = word.size() > 16 || has_zeros;
    low = load(at, word.size(), readable);
    if (word.size() > 8) high = load(at + 8, word.size() - 8, readable);
    hash = mixed(low, high ^ word.size() << 56);
    if (!is_long) return;
    for (size_t done = 16; done < word.size(); done += 8)
      hash = mixed(hash, load(at + done, word.size() - done, readable));
    low = hash;
  }

  static uint64_t mixed(uint64_t one, uint64_t other) {
    const auto product = static_cast<unsigned __int128>(one ^ 0x9e3779b97f4a7c15) * (other ^ 0xe7037ed1a0b428db);
    return uint64_t(product) ^ uint64_t(product >> 64);
  }
};

// A hash table of words that is emptied as a whole. A short word with few ids, as most of a text are, takes half a
// cache line. `overflow` has the bytes of long words, padded to fours, and the ids of words with more of them.
class Generation {
 public:
  explicit Generation(size_t bytes) {
    size_t slots = 64;
    while (slots * 2 * sizeof(Slot) <= bytes / 2) slots *= 2;
    slots_.resize(slots);
    overflow_.reserve(std::max<size_t>(bytes / 2 / sizeof(uint32_t), 4096));
  }

  // Begins to load the part of the table that `find` reads first.
  void prefetch(const Key& key) const { __builtin_prefetch(&slots_[key.hash & (slots_.size() - 1)]); }

  bool find(const Key& key, Segmented& found) const {
    if (!num_words_) return false;
    const size_t mask = slots_.size() - 1;
    for (size_t at = key.hash & mask; slots_[at].quarter_nats; at = (at + 1) & mask) {
      const Slot& slot = slots_[at];
      if (slot.low != key.low || !is_same(slot, key)) continue;
      found = {slot.count <= kInline ? slot.ids : &overflow_[slot.ids[0]], slot.count, slot.quarter_nats};
      return true;
    }
    return false;
  }

  // Inserts a word that is not there yet, and returns whether there was room for it.
  bool insert(const Key& key, const Segmented& segmented) {
    const size_t words = key.is_long ? (key.word.size() + 3) / 4 : 0;
    const size_t ids = segmented.count > kInline ? segmented.count : 0;
    if (num_words_ >= slots_.size() / 4 * 3 || overflow_.size() + words + ids > overflow_.capacity()) return false;
    const size_t mask = slots_.size() - 1;
    size_t at = key.hash & mask;
    while (slots_[at].quarter_nats) at = (at + 1) & mask;
    Slot& slot = slots_[at];
    slot = {key.low, key.high, segmented.count, std::max<uint16_t>(segmented.quarter_nats, 1), {}};
    if (key.is_long) {
      slot.high = long_word(key) | overflow_.size();
      overflow_.resize(overflow_.size() + words);
      std::memcpy(&overflow_[overflow_.size() - words], key.word.data(), key.word.size());
    }
    if (ids) slot.ids[0] = uint32_t(overflow_.size());
    if (ids) overflow_.insert(overflow_.end(), segmented.ids, segmented.ids + ids);
    else std::copy_n(segmented.ids, segmented.count, slot.ids);
    num_words_++;
    return true;
  }

  void clear() {
    std::fill(slots_.begin(), slots_.end(), Slot{});
    overflow_.clear();
    num_words_ = 0;
  }

  size_t num_words() const { return num_words_; }
  size_t num_bytes() const { return slots_.size() * sizeof(Slot) + overflow_.capacity() * sizeof(uint32_t); }

 private:
  static constexpr size_t kInline = 3;
  struct alignas(32) Slot {
    uint64_t low = 0, high = 0;
    uint16_t count = 0, quarter_nats = 0;  // 0 quarter nats are an empty slot
    uint32_t ids[kInline] = {};
  };

  // The upper half of `high` for a long word. 0xff is no byte of UTF-8, so no short word has it. The lower half is
  // where the word is in `overflow`.
  static uint64_t long_word(const Key& key) { return uint64_t(0xff) << 56 | uint64_t(key.word.size()) << 32; }

  bool is_same(const Slot& slot, const Key& key) const {
    if (!key.is_long) return slot.high == key.high;
    return slot.high >> 32 == long_word(key) >> 32 &&
           !std::memcmp(&overflow_[uint32_t(slot.high)], key.word.data(), key.word.size());
  }

  std::vector<Slot> slots_;
  Ids overflow_;
  size_t num_words_ = 0;
};

// When the young generation is full, it becomes the old one, and what was the old one is forgotten. Words that occur
// again meanwhile are copied from the old one to the young one, so frequent words stay.
class WordCache {
 public:
  explicit WordCache(size_t bytes) : young_(bytes / 2), old_(bytes / 2) {}

  void prefetch(const Key& key) const { young_.prefetch(key); }

  // Calls `take` with the ids of a word if they are known, and returns whether they are.
  template <typename Take>
  bool find(const Key& key, Take take) {
    Segmented found;
    if (young_.find(key, found)) {
      take(found);
      return true;
    }
    if (!old_.find(key, found)) return false;
    take(found);
    copied_.assign(found.ids, found.ids + found.count);  // as the old generation may be emptied now
    insert(key, {copied_.data(), found.count, found.quarter_nats});
    return true;
  }

  void insert(const Key& key, const Segmented& segmented) {
    if (young_.insert(key, segmented)) return;
    std::swap(young_, old_);
    young_.clear();
    young_.insert(key, segmented);
  }

  size_t num_words() const { return young_.num_words() + old_.num_words(); }
  size_t num_bytes() const { return young_.num_bytes() + old_.num_bytes(); }

 private:
  Generation young_, old_;
  Ids copied_;
};
