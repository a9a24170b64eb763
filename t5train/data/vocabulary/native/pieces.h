// The pieces of a vocabulary, and the cheapest segmentation of a word into them.
#pragma once

#include <array>
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

  // `pieces` are those of printable ASCII and ' ', which stands for SentencePiece's U+2581. `costs` are those of all.
  Pieces(Numbered pieces, std::vector<int32_t> costs, int32_t unknown_cost)
      : costs_(std::move(costs)), unknown_cost_(unknown_cost) {
    if (pieces.empty()) throw std::invalid_argument("there are no pieces");
    for (const auto& piece : pieces)
      if (piece.first.empty() || piece.second >= costs_.size()) throw std::invalid_argument("a piece has no cost");
    std::sort(pieces.begin(), pieces.end());
    grow();
    nodes_[0].link = kRootLabel;
    place(pieces, 0, pieces.size(), 0, 0);
  }

  // Segments ' ' and a word of printable ASCII as SentencePiece does: the first of equally cheap ones wins, a
  // character that is no piece is unknown, and adjacent unknown ones become one id. `ids` has room for one id more
  // than the word has bytes, at most kLongestWord.
  Segmented cheapest(std::string_view word, uint32_t* ids) const {
    std::array<Best, kLongestWord + 2> best;
    const uint32_t size = uint32_t(word.size()) + 1;
    for (uint32_t end = 1; end <= size; end++) best[end].cost = INT_MAX;
    best[0].cost = 0;
    for (uint32_t start = 0; start < size; start++) extend(word, start, best.data());
    uint32_t count = 0;
    for (uint32_t end = size; end > 0; end = best[end].start)
      if (!count || best[end].id != kUnknown || ids[count - 1] != kUnknown) ids[count++] = best[end].id;
    std::reverse(ids, ids + count);
    return {ids, uint16_t(count), quarter_nats(best[size].cost)};
  }

 private:
  struct Best {
    int32_t cost;
    uint32_t id, start;
  };
  struct Node {
    uint32_t link = 0;  // base << 8 | label; a free node has label 0
    int32_t piece = -1;
  };
  using Children = std::vector<std::pair<Byte, size_t>>;  // a label, and the first piece below it

  static constexpr uint32_t kRootLabel = 0xff, kBlock = 128;  // labels are lower than kBlock, so siblings share a block
  static constexpr size_t kSearchedBlocks = 2;  // with 16, T5's vocabulary takes 1% less memory, but 0.2 s to build

  // Offers every piece that begins at `start` as the last one of the segmentation up to its end.
  void extend(std::string_view word, uint32_t start, Best* best) const {
    const int32_t before = best[start].cost;
    bool is_piece = false;
    uint32_t node = 0;
    for (uint32_t end = start; end <= word.size(); end++) {
      const Byte byte = end ? Byte(word[end - 1]) : ' ';
      node = nodes_[node].link >> 8 ^ byte;
      if ((nodes_[node].link & 0xff) != byte) break;
      const int32_t piece = nodes_[node].piece;
      if (piece < 0) continue;
      is_piece |= end == start;
      if (const int32_t cost = before + costs_[piece]; cost < best[end + 1].cost)
        best[end + 1] = {cost, uint32_t(piece), start};
    }
    if (const int32_t cost = before + unknown_cost_; !is_piece && cost < best[start + 1].cost)
      best[start + 1] = {cost, kUnknown, start};
  }

  // Places the children of `node`, whose path is the first `depth` bytes of the pieces [first, last).
  void place(const Numbered& pieces, size_t first, size_t last, size_t depth, uint32_t node) {
    if (pieces[first].first.size() == depth) nodes_[node].piece = int32_t(pieces[first++].second);
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
      place(pieces, children[at].second, end, depth + 1, base ^ children[at].first);
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
    is_base_.resize(nodes_.size());
    if (nodes_.size() >= 1u << 24) throw std::invalid_argument("there are too many pieces");
  }

  std::vector<Node> nodes_;
  std::vector<bool> is_base_;
  std::vector<int32_t> costs_;
  int32_t unknown_cost_;
};
