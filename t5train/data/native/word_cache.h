// Remembers the ids of words, within a bound of memory.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>
#include <utility>

#if __has_include(<sys/mman.h>)
#include <sys/mman.h>
#endif

#include "word.h"

// A word as the cache compares it: up to 16 bytes are two numbers. Of longer ones, the first number is the hash.
struct Key {
  std::string_view word;
  uint64_t low = 0, high = 0, hash = 0;
  bool is_long = false;

  Key() = default;
  // Bytes before `readable` can be read. Words with zeros are handled as long ones, as zeros end short ones.
  Key(std::string_view bytes, const Byte* readable, bool has_zeros) { assign(bytes, readable, has_zeros); }

  // Changes a key where it is, which takes less time than to copy a new one.
  void assign(std::string_view bytes, const Byte* readable, bool has_zeros) {
    word = bytes;
    const auto* at = reinterpret_cast<const Byte*>(word.data());
    is_long = word.size() > 16 || has_zeros;
    low = load(at, word.size(), readable);
    high = word.size() > 8 ? load(at + 8, word.size() - 8, readable) : 0;
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

// Memory that is read here and there, in pages that are large enough for the processor to remember where they are.
template <typename Value>
struct LargePages {
  using value_type = Value;
  static constexpr size_t kPageBytes = 2 << 20;

  LargePages() = default;
  template <typename Other>
  explicit LargePages(const LargePages<Other>&) {}

  Value* allocate(size_t count) {
    const size_t page = count * sizeof(Value) < kPageBytes ? alignof(Value) : kPageBytes;
    const size_t bytes = (count * sizeof(Value) + page - 1) / page * page;
    void* memory = std::aligned_alloc(std::max(page, alignof(std::max_align_t)), bytes);
    if (!memory) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    if (page == kPageBytes) madvise(memory, bytes, MADV_HUGEPAGE);  // if it fails, pages are small
#endif
    return static_cast<Value*>(memory);
  }
  void deallocate(Value* memory, size_t) { std::free(memory); }

  friend bool operator==(const LargePages&, const LargePages&) { return true; }
  friend bool operator!=(const LargePages&, const LargePages&) { return false; }
};

// A hash table of words that is emptied as a whole. A short word with few ids, as most of a text are, takes half a
// cache line. `overflow` has the bytes of long words, padded to whole ids, and the ids of words with more of them.
template <typename Id>
class Generation {
 public:
  explicit Generation(size_t bytes) {
    size_t slots = 64;
    while (slots * 2 * sizeof(Slot) <= bytes / 2) slots *= 2;
    slots_.resize(slots);
    overflow_.reserve(std::max<size_t>(bytes / 2, 16384) / sizeof(Id));
  }

  // Begins to load the part of the table that `find` reads first.
  void prefetch(const Key& key) const { __builtin_prefetch(&slots_[key.hash & (slots_.size() - 1)]); }

  // Returns the ids of a word, a null pointer if it is not there.
  Segmented<Id> find(const Key& key) const {
    if (!num_words_) return {};
    const size_t mask = slots_.size() - 1;
    for (size_t at = key.hash & mask; slots_[at].quarter_nats; at = (at + 1) & mask) {
      const Slot& slot = slots_[at];
      if (slot.low != key.low || !is_same(slot, key)) continue;
      return {slot.count <= kInline ? slot.ids : &overflow_[slot.first_id()], slot.count, slot.quarter_nats};
    }
    return {};
  }

  // Inserts a word that is not there yet, and returns whether there was room for it.
  bool insert(const Key& key, const Segmented<Id>& segmented) {
    const size_t units = key.is_long ? (key.word.size() + sizeof(Id) - 1) / sizeof(Id) : 0;
    const size_t ids = segmented.count > kInline ? segmented.count : 0;
    if (num_words_ >= slots_.size() / 4 * 3 || overflow_.size() + units + ids > overflow_.capacity()) return false;
    const size_t mask = slots_.size() - 1;
    size_t at = key.hash & mask;
    while (slots_[at].quarter_nats) at = (at + 1) & mask;
    Slot& slot = slots_[at];
    slot = {key.low, key.high, segmented.count, std::max<uint16_t>(segmented.quarter_nats, 1), {}};
    if (key.is_long) {
      slot.high = long_word(key) | overflow_.size();
      overflow_.resize(overflow_.size() + units);
      std::memcpy(&overflow_[overflow_.size() - units], key.word.data(), key.word.size());
    }
    if (ids) slot.set_first_id(uint32_t(overflow_.size()));
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
  size_t num_bytes() const { return slots_.size() * sizeof(Slot) + overflow_.capacity() * sizeof(Id); }

 private:
  static constexpr size_t kInline = 12 / sizeof(Id);
  struct alignas(32) Slot {
    uint64_t low = 0, high = 0;
    uint16_t count = 0, quarter_nats = 0;  // 0 quarter nats are an empty slot
    Id ids[kInline] = {};                  // or, of more of them, the place of the first one in `overflow`

    uint32_t first_id() const {
      uint32_t place = 0;
      std::memcpy(&place, ids, sizeof(place));
      return place;
    }
    void set_first_id(uint32_t place) { std::memcpy(ids, &place, sizeof(place)); }
  };

  // The upper half of `high` for a long word. 0xff is no byte of UTF-8, so no short word has it. The lower half is
  // where the word is in `overflow`.
  static uint64_t long_word(const Key& key) { return uint64_t(0xff) << 56 | uint64_t(key.word.size()) << 32; }

  bool is_same(const Slot& slot, const Key& key) const {
    if (!key.is_long) return slot.high == key.high;
    return slot.high >> 32 == long_word(key) >> 32 &&
           !std::memcmp(&overflow_[uint32_t(slot.high)], key.word.data(), key.word.size());
  }

  std::vector<Slot, LargePages<Slot>> slots_;
  std::vector<Id> overflow_;
  size_t num_words_ = 0;
};

// When the young generation is full, it becomes the old one, and what was the old one is forgotten. Words that occur
// again meanwhile are copied from the old one to the young one, so frequent words stay.
template <typename Id>
class WordCache {
 public:
  explicit WordCache(size_t bytes) : young_(bytes / 2), old_(bytes / 2) {}

  void prefetch(const Key& key) const { young_.prefetch(key); }

  // Returns the ids of a word that is in the young generation, a null pointer if it is not. They stay where they are
  // until `num_turnovers` changes. Begins to load what `find` reads next.
  Segmented<Id> find_young(const Key& key) const {
    const auto found = young_.find(key);
    if (!found.ids) old_.prefetch(key);
    return found;
  }

  // Returns the ids of a word, a null pointer if they are not known. They stay where they are until the next call.
  Segmented<Id> find(const Key& key) {
    if (const auto found = young_.find(key); found.ids) return found;
    const auto found = old_.find(key);
    if (!found.ids) return {};
    copied_.assign(found.ids, found.ids + found.count);  // as the old generation may be emptied now
    insert(key, {copied_.data(), found.count, found.quarter_nats});
    return {copied_.data(), found.count, found.quarter_nats};
  }

  void insert(const Key& key, const Segmented<Id>& segmented) {
    if (young_.insert(key, segmented)) return;
    std::swap(young_, old_);
    young_.clear();
    young_.insert(key, segmented);
    num_turnovers_++;
  }

  size_t num_turnovers() const { return num_turnovers_; }
  size_t num_words() const { return young_.num_words() + old_.num_words(); }
  size_t num_bytes() const { return young_.num_bytes() + old_.num_bytes(); }

 private:
  Generation<Id> young_, old_;
  std::vector<Id> copied_;
  size_t num_turnovers_ = 0;
};
