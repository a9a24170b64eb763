// A vocabulary's rules of normalisation: whether words can be normalised one by one, and how.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "word.h"

// SentencePiece's precompiled_charsmap: the size of a double array (of darts-clone, which its format is of), the
// array, which maps texts to places in the rest, and there the texts that replace them, each with a zero at its end.
class Rules {
 public:
  explicit Rules(std::string_view table) {
    uint32_t size = 0;
    if (table.size() < sizeof(size)) return;
    std::memcpy(&size, table.data(), sizeof(size));
    if (size > table.size() - sizeof(size)) return;
    units_.resize(size / sizeof(uint32_t));
    std::memcpy(units_.data(), table.data() + sizeof(size), units_.size() * sizeof(uint32_t));
    replacements_ = std::string(table.substr(sizeof(size) + size));
  }

  // Whether texts can be normalised word by word: the spaces of ASCII become ' ', its printable characters stay, no
  // rule has a character of ASCII after another one, and none gives two spaces or U+2581.
  bool keep_words_apart() const {
    if (units_.empty()) return false;
    const uint32_t root = offset(0);
    for (uint32_t byte = 1; byte < 0x80; byte++) {
      const uint32_t node = child(root, byte);
      const bool has_rule = node && has_value(node);
      const bool is_space = (byte >= '\t' && byte <= '\r' && byte != '\v');
      if (is_space && !(has_rule && replacement(node) == " ")) return false;
      if (byte >= ' ' && byte < 0x7f && has_rule) return false;
    }
    if (replacements_.find("  ") != replacements_.npos || replacements_.find("\xe2\x96\x81") != replacements_.npos)
      return false;
    return !has_later_ascii(root);
  }

  // Normalises a word as SentencePiece does, except that ' ' stands for U+2581, and that none is put before the word.
  void normalise(std::string_view word, std::string& normalised) const {
    normalised.clear();
    bool is_after_space = true;
    for (size_t at = 0; at < word.size();) {
      auto [size, text] = longest_match(word.substr(at));
      if (!size) {
        size = std::min<size_t>(character_bytes(Byte(word[at])), word.size() - at);
        text = word.substr(at, size);
      }
      at += size;
      while (is_after_space && !text.empty() && text[0] == ' ') text.remove_prefix(1);
      if (text.empty()) continue;
      normalised += text;
      is_after_space = text.back() == ' ';
    }
    while (!normalised.empty() && normalised.back() == ' ') normalised.pop_back();
  }

 private:
  // The size of the longest text that a rule replaces at the beginning, 0 if there is none, and what replaces it.
  std::pair<size_t, std::string_view> longest_match(std::string_view text) const {
    std::pair<size_t, std::string_view> longest{0, {}};
    uint32_t base = offset(0);
    for (size_t at = 0; at < text.size(); at++) {
      const uint32_t node = child(base, Byte(text[at]));
      if (!node) break;
      if (has_value(node)) longest = {at + 1, replacement(node)};
      base = node ^ offset(node);
    }
    return longest;
  }

  uint32_t offset(uint32_t node) const { return units_[node] >> 10 << ((units_[node] & 1 << 9) >> 6); }
  bool has_value(uint32_t node) const { return units_[node] >> 8 & 1; }
  // The node that follows for a byte, 0 if there is none. `base` is that of the node before.
  uint32_t child(uint32_t base, uint32_t byte) const {
    const uint32_t node = base ^ byte;
    return node < units_.size() && (units_[node] & 0x800000ff) == byte ? node : 0;
  }
  std::string_view replacement(uint32_t node) const {
    const uint32_t leaf = node ^ offset(node);
    const uint32_t start = leaf < units_.size() ? units_[leaf] & 0x7fffffff : UINT32_MAX;
    if (start >= replacements_.size()) return {};
    return std::string_view(replacements_).substr(start, replacements_.find('\0', start) - start);
  }

  // Whether a byte of ASCII follows another byte. Nodes that several rules share are visited once.
  bool has_later_ascii(uint32_t root) const {
    std::vector<bool> seen(units_.size());
    std::vector<uint32_t> bases{root};
    for (bool is_first = true; !bases.empty(); is_first = false) {
      const uint32_t base = bases.back();
      bases.pop_back();
      for (uint32_t byte = 1; byte < 0x100; byte++) {
        const uint32_t node = child(base, byte);
        if (!node || seen[node]) continue;
        if (byte < 0x80 && !is_first) return true;
        seen[node] = true;
        bases.push_back(node ^ offset(node));
      }
    }
    return false;
  }

  std::vector<uint32_t> units_;
  std::string replacements_;
};
