// The pieces of a vocabulary, and the cheapest segmentation of a word into them.
#pragma once

#include <array>
#include <bitset>
#include <climits>
#include <stdexcept>
#include <string>
#include <utility>

#include "word.h"

// A double array, eight bytes a node, so that it fits into the second-level cache. The child of a node for a byte is
// at base ^ byte, if the node there has this byte as its label. No two nodes have the same base.
class Pieces {
 public:
  using Numbered = std::vector<std::pair<std::string, uint32_t>>;

  // Pieces have ' ' in place of SentencePiece's U+2581, and contain no zeros. `costs` are those of all ids.
  Pieces(Numbered pieces, const std::vector<int32_t>& costs, int32_t unknown_cost) : unknown_cost_(unknown_cost) {
    if (pieces.empty()) throw std::invalid_argument("there are no pieces");
    for (const auto& [piece, id] : pieces) {
      const bool has_label_of_free_nodes = piece.find('\0') != piece.npos;
      if (piece.empty() || has_label_of_free_nodes || id >= costs.size() || costs[id] < 0)
        throw std::invalid_argument("a piece is empty, has a zero, or has no cost");
    }
    for (const auto& [piece, _] : pieces)
      for (size_t at = 1; at < piece.size(); at++) neighbours_.set(pair(Byte(piece[at - 1]), Byte(piece[at])));
    std::sort(pieces.begin(), pieces.end());
    grow();
    nodes_[0].link = kRootLabel;
    place(pieces, costs, 0, pieces.size(), 0, 0);
  }

  // Where the part of a word of ASCII that begins at `start` ends: no piece reaches over that place, because none has
  // the bytes on both sides of it next to each other. So the ids of a word are those of its parts.
  size_t part_end(std::string_view word, size_t start) const {
    size_t end = start + 1;
    while (end < word.size() && neighbours_[pair(Byte(word[end - 1]), Byte(word[end]))]) end++;
    return end;
  }

  // Segments a normalised text as SentencePiece does: the first of equally cheap ones wins, a character that is no
  // piece is unknown, and adjacent unknown ones become one id. `ids` has room for as many ids as the text has bytes, at
  // most kLongestWord + 1; none of them is zero.
  template <typename Id>
  Segmented<Id> cheapest(std::string_view text, Id* ids) const {
    std::array<Best, kLongestWord + 2> best;
    const auto* bytes = reinterpret_cast<const Byte*>(text.data());
    const uint32_t size = uint32_t(text.size());
    for (uint32_t end = 1; end <= size; end++) best[end].cost = INT_MAX;
    best[0].cost = 0;
    for (uint32_t start = 0; start < size;) {
      const uint32_t next = std::min(start + character_bytes(bytes[start]), size);
      extend(bytes, start, next, size, best.data());
      start = next;
    }
    uint32_t count = 0;
    for (uint32_t end = size; end > 0; end = best[end].start)
      if (const uint32_t id = ids_[best[end].node]; !count || id != kUnknown || ids[count - 1] != kUnknown)
        ids[count++] = Id(id);
    std::reverse(ids, ids + count);
    return {ids, uint16_t(count), quarter_nats(best[size].cost)};
  }

 private:
  struct Best {
    int32_t cost;
    uint32_t node, start;  // of the last piece; the root stands for an unknown character
  };
  struct Node {
    uint32_t link = 0;  // base << 8 | label; a free node has label 0
    int32_t cost = -1;  // of the piece that ends here, if it is not negative
  };
  using Children = std::vector<std::pair<Byte, size_t>>;  // a label, and the first piece below it

  static constexpr uint32_t kRootLabel = 0xff, kBlock = 256;  // labels are lower than kBlock, so siblings share a block
  static constexpr size_t kSearchedBlocks = 1;  // more of them take little less memory, but much longer to build

  // Offers every piece that begins at `start`, with the character up to `next`, as the last one up to its end.
  void extend(const Byte* text, uint32_t start, uint32_t next, uint32_t size, Best* best) const {
    const int32_t before = best[start].cost;
    bool is_piece = false;
    uint32_t link = nodes_[0].link;
    for (uint32_t end = start; end < size;) {
      const uint32_t node = link >> 8 ^ text[end];
      link = nodes_[node].link;
      if (Byte(link) != text[end++]) break;
      if (nodes_[node].cost < 0) continue;
      is_piece |= end == next;
      if (const int32_t cost = before + nodes_[node].cost; cost < best[end].cost) best[end] = {cost, node, start};
    }
    if (const int32_t cost = before + unknown_cost_; !is_piece && cost < best[next].cost)
      best[next] = {cost, 0, start};
  }

  // Places the children of `node`, whose path is the first `depth` bytes of the pieces [first, last).
  void place(const Numbered& pieces, const std::vector<int32_t>& costs, size_t first, size_t last, size_t depth,
             uint32_t node) {
    if (pieces[first].first.size() == depth) {
      ids_[node] = pieces[first++].second;
      nodes_[node].cost = costs[ids_[node]];
    }
    Children children;
    for (size_t at = first; at < last; at++)
      if (const Byte label = Byte(pieces[at].first[depth]); children.empty() || children.back().first != label)
        children.emplace_back(label, at);
    const uint32_t base = free_base(children);
    is_base_[base] = true;
    nodes_[node].link |= base << 8;
    for (const auto& child : children) nodes_[base ^ child.first].link = child.first;
    for (size_t at = 0; at < children.size(); at++) {
      const size_t end = at + 1 < children.size() ? children[at + 1].second : last;
      place(pieces, costs, children[at].second, end, depth + 1, base ^ children[at].first);
    }
  }

  uint32_t free_base(const Children& children) {
    const auto is_free = [&](size_t base) {
      return std::all_of(children.begin(), children.end(), [&](const auto& child) {
        return !(nodes_[base ^ child.first].link & 0xff);
      });
    };
    const size_t searched = kSearchedBlocks * kBlock;
    for (size_t base = nodes_.size() > searched ? nodes_.size() - searched : 0;; base++) {
      if (base == nodes_.size()) grow();
      if (!is_base_[base] && is_free(base)) return uint32_t(base);
    }
  }

  void grow() {
    nodes_.resize(nodes_.size() + kBlock);
    ids_.resize(nodes_.size(), kUnknown);
    is_base_.resize(nodes_.size());
    if (nodes_.size() >= 1u << 24) throw std::invalid_argument("there are too many pieces");
  }

  static size_t pair(Byte first, Byte second) { return size_t(first) << 8 | second; }

  std::bitset<1 << 16> neighbours_;  // pairs of bytes that are next to each other in a piece
  std::vector<Node> nodes_;
  std::vector<uint32_t> ids_;  // of the pieces that end at nodes
  std::vector<bool> is_base_;
  int32_t unknown_cost_;
};
