// What the parts of the segmenter have in common: bytes, costs and segmented words.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words are compared as little-endian numbers"
#endif

using Byte = unsigned char;

constexpr uint32_t kEos = 1, kUnknown = 2;
constexpr size_t kLongestWord = 255;         // bytes; longer ones are neither segmented nor cached
constexpr int kStepsPerQuarterNat = 1 << 9;  // costs, which are negative scores, have 2048 steps a nat

// The ids of a word, and an upper bound of its cost; a cost of UINT16_MAX may be higher.
template <typename Id>
struct Segmented {
  const Id* ids = nullptr;
  uint16_t count = 0, quarter_nats = 0;
};

inline uint16_t quarter_nats(int64_t cost) {
  return uint16_t(std::min<int64_t>((cost + kStepsPerQuarterNat - 1) / kStepsPerQuarterNat, UINT16_MAX));
}

// The number of bytes of the character of valid UTF-8 that begins with `first`.
inline uint32_t character_bytes(Byte first) {
  if (first < 0x80) return 1;
  return first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
}

// Up to eight bytes as a number. Bytes before `readable` can be read, even if they are not used.
inline uint64_t load(const Byte* from, size_t size, const Byte* readable) {
  uint64_t value = 0;
  if (readable - from < 8) {
    std::memcpy(&value, from, std::min<size_t>(size, 8));
    return value;
  }
  std::memcpy(&value, from, 8);
  return size >= 8 ? value : value & ((uint64_t(1) << size * 8) - 1);
}
