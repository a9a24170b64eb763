// Segments texts into the pieces of a T5 vocabulary, word by word, and remembers the ids of words.
//
// document_encoder.py explains why this gives the ids of Encoder, and for which vocabularies.
// segmenter_build.py compiles this file. Python is asked for the ids of words of texts whose characters may combine, and
// of whole texts where the sums of Encoder may have rounding errors. An object is for one thread: calls hold Python's
// global lock and change the cache. Ids are of two bytes where that suffices, because then more words fit into a cache.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <iterator>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>

#include "json_lines.h"
#include "words.h"

namespace {

constexpr uint32_t kExactQuarterNats = 8192 * 4 - 4;  // Encoder's float32 sums are exact up to 8192 nats
constexpr int64_t kStretchCharacters = 1200;          // Encoder cuts a text at the next space, and begins a new sum
constexpr uint32_t kWordMark = 0x2581;                // SentencePiece's symbol for a space
constexpr size_t kKeptIds = 1 << 22;                  // 16 MiB, more than a batch of usual texts has

bool is_space(Byte byte) { return byte == ' ' || (byte >= '\t' && byte <= '\r' && byte != '\v'); }
bool begins_character(Byte byte) { return (byte & 0xc0) != 0x80; }

// The character that begins here, of valid UTF-8.
uint32_t character(const Byte* at) {
  if (at[0] < 0x80) return at[0];
  if (at[0] < 0xe0) return (at[0] & 0x1fu) << 6 | (at[1] & 0x3fu);
  if (at[0] < 0xf0) return (at[0] & 0xfu) << 12 | (at[1] & 0x3fu) << 6 | (at[2] & 0x3fu);
  return (at[0] & 7u) << 18 | (at[1] & 0x3fu) << 12 | (at[2] & 0x3fu) << 6 | (at[3] & 0x3fu);
}

struct Text {
  const Byte *begin, *end;
  bool is_ascii;

  explicit Text(const py::handle& text) {
    Py_ssize_t size = 0;
    const char* bytes = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
    if (!bytes) throw py::error_already_set();
    begin = reinterpret_cast<const Byte*>(bytes);
    end = begin + size;
    is_ascii = PyUnicode_IS_ASCII(text.ptr());
  }
};

// Arrays from Python: the ids of several texts or words one after the other, and the number of ids of each.
template <typename Id>
class Encoded {
 public:
  Encoded(const py::object& ids, const py::object& counts, size_t size)
      : ids_(Array::ensure(ids)), counts_(Array::ensure(counts)) {
    if (!ids_ || !counts_ || size_t(counts_.size()) != size) throw std::invalid_argument("not the ids of these texts");
  }

  // Calls `take` with the ids of each, in order.
  template <typename Take>
  void each(Take take) const {
    const int64_t* ids = ids_.data();
    for (py::ssize_t at = 0; at < counts_.size(); ids += counts_.data()[at++]) {
      if (ids + counts_.data()[at] > ids_.data() + ids_.size()) throw std::invalid_argument("there are too few ids");
      take(size_t(at), std::vector<Id>(ids, ids + counts_.data()[at]));
    }
  }

 private:
  using Array = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;
  Array ids_, counts_;
};

// One call's texts: the ids of texts in the order in which they were finished, and what Python has to encode.
template <typename Id>
struct Batch {
  using Ids = std::vector<Id>;
  struct Slice {
    size_t start = 0, count = 0;
  };
  struct Learned {
    Ids ids;
    uint16_t quarter_nats = 0;  // 0 while they are not known
  };
  Ids ids;
  std::vector<Slice> slices;
  std::vector<size_t> waiting, rounded;  // texts
  std::unordered_map<std::string, Learned> learned;
  std::array<std::vector<std::string>, 2> unknown;  // names of words, by whether their text has combining characters

  void append(const Id* added, size_t count) {
    ids.insert(ids.end(), added, added + count);
  }

  void end_text(size_t number, size_t start) {
    ids.push_back(kEos);
    slices[number] = {start, ids.size() - start};
  }
};

// The sum that Encoder forms for the present stretch of a text, and whether the text can be finished.
struct Sum {
  uint32_t quarter_nats = 0;
  bool waits = false, is_rounded = false;

  void add(uint32_t word) {
    quarter_nats += word;
    is_rounded |= quarter_nats > kExactQuarterNats;
  }
};

// Consecutive words that have not been looked up yet.
struct Pending {
  std::array<Key, kLookedUpTogether> keys;
  size_t count = 0;
};

template <typename Id>
class Segmenter {
 public:
  Segmenter(Pieces::Numbered pieces, const std::vector<int32_t>& costs, int32_t unknown_cost, std::string_view table,
            std::string combining, size_t cache_bytes)
      : words_(std::move(pieces), costs, unknown_cost, table, cache_bytes), combining_(std::move(combining)) {
    if (combining_.size() != 0x10000 / 8) throw std::invalid_argument("the basic plane has one bit for each character");
  }

  // Returns the ids of all texts, each followed by EOS, and the number of ids of each text.
  // `encode_words(words, combines)` returns their ids, the numbers of ids and upper bounds of their costs.
  // `encode_texts(texts)` returns their ids and the numbers of ids, both with EOS.
  py::tuple encode(const py::list& texts, const py::function& encode_words, const py::function& encode_texts) {
    Batch<Id> batch;
    batch.ids = std::move(buffer_);  // keeps its memory from call to call
    batch.ids.clear();
    batch.slices.resize(texts.size());
    for (size_t number = 0; number < texts.size(); number++) segment(Text(texts[number]), number, batch);
    while (!batch.waiting.empty()) {  // more than once if the cache has forgotten a word meanwhile
      learn(batch, encode_words);
      for (const size_t number : std::exchange(batch.waiting, {})) segment(Text(texts[number]), number, batch);
    }
    take_rounded(texts, batch, encode_texts);
    const py::tuple result = assembled(batch.ids, batch.slices);
    if (batch.ids.capacity() <= kKeptIds) buffer_ = std::move(batch.ids);
    return result;
  }

  size_t num_words() const { return words_.cache.num_words(); }
  size_t num_bytes() const { return words_.cache.num_bytes(); }

 private:
  using Ids = std::vector<Id>;

  bool is_combining(uint32_t one) const { return one >= 0x10000 || (combining_[one / 8] >> one % 8 & 1); }

  // Appends the ids of a text, or lists it as one that waits for words or that Encoder has to encode.
  void segment(const Text& text, size_t number, Batch<Id>& batch) {
    const size_t start = batch.ids.size();
    bool combines = false, has_mark = false;
    for (const Byte* at = text.begin; !text.is_ascii && at < text.end; at++) {
      if (*at < 0x80 || !begins_character(*at)) continue;
      has_mark |= character(at) == kWordMark;  // it is not separated from spaces beside it
      combines |= is_combining(character(at));
    }
    Sum sum;
    if (!has_mark) add_words(text, combines, batch, sum);
    if (!has_mark && !sum.is_rounded && !sum.waits) return batch.end_text(number, start);
    batch.ids.resize(start);
    (has_mark || sum.is_rounded ? batch.rounded : batch.waiting).push_back(number);
  }

  void add_words(const Text& text, bool combines, Batch<Id>& batch, Sum& sum) {
    int64_t characters = 0, stretch = 0;
    Pending pending;
    for (const Byte* at = text.begin;;) {
      for (; at < text.end && is_space(*at); at++, characters++) {
        // Where characters combine, Encoder cuts the normalised text, and at other spaces: then the sum goes on.
        if (*at != ' ' || combines || characters - stretch < kStretchCharacters) continue;
        look_up(pending, batch, sum);
        sum.quarter_nats = 0;
        stretch = characters + 1;
      }
      if (at == text.end) break;
      const Byte* begin = at;
      at = plain_end(at, text.end);
      bool plain = at == text.end || is_space(*at);
      while (at < text.end && !is_space(*at)) at++;
      if (combines) plain &= !join(text, begin, at);
      characters += text.is_ascii ? at - begin : std::count_if(begin, at, begins_character);
      const std::string_view word(reinterpret_cast<const char*>(begin), size_t(at - begin));
      const bool is_independent = plain || (!combines && word.find('\0') == word.npos);
      if (is_independent && word.size() <= kLongestWord) {
        if (pending.count == pending.keys.size()) look_up(pending, batch, sum);
        Key& key = pending.keys[pending.count++];
        key.assign(word, text.end, false);
        words_.cache.prefetch(key);
      } else {
        look_up(pending, batch, sum);
        add_other(word, combines, batch, sum);
      }
    }
    look_up(pending, batch, sum);
  }

  // Extends a word over spaces next to a combining character, which may be normalised together with it.
  bool join(const Text& text, const Byte*& begin, const Byte*& end) const {
    const Byte *first = begin, *last = end;
    if (is_combining(character(begin)))
      while (begin > text.begin && is_space(begin[-1])) begin--;
    while (end < text.end) {
      const Byte* before = end - 1;
      while (!begins_character(*before)) before--;
      const Byte* next = std::find_if_not(end, text.end, is_space);
      if (!is_combining(character(before)) && (next == text.end || !is_combining(character(next)))) break;
      end = std::find_if(next, text.end, is_space);
    }
    return begin != first || end != last;
  }

  void look_up(Pending& pending, Batch<Id>& batch, Sum& sum) {
    std::array<Segmented<Id>, kLookedUpTogether> found;
    const auto begin = [&](size_t first) {
      for (size_t at = first; at < pending.count; at++) found[at] = words_.cache.find_young(pending.keys[at]);
    };
    begin(0);
    for (size_t at = 0; at < pending.count; at++) {
      if (found[at].ids) {
        take(found[at], batch, sum);
        continue;
      }
      const size_t turnovers = words_.cache.num_turnovers();
      const auto segmented = words_.segment(pending.keys[at]);
      if (segmented.ids) take(segmented, batch, sum);
      else sum.is_rounded = true;  // Encoder encodes the whole text
      if (turnovers != words_.cache.num_turnovers()) begin(at + 1);
    }
    pending.count = 0;
  }

  static void take(const Segmented<Id>& found, Batch<Id>& batch, Sum& sum) {
    batch.append(found.ids, found.count);
    sum.add(found.quarter_nats);
  }

  // Appends the ids of a word that Python encodes. Where characters combine, the whole text is normalised in another
  // way, which may change the ids of this word, too: it is remembered under another name.
  void add_other(std::string_view word, bool combines, Batch<Id>& batch, Sum& sum) {
    std::string name(combines, kCombines);
    name += word;
    if (name.size() > kLongestWord) {  // it would not be remembered, so Encoder encodes the whole text at once
      sum.is_rounded = true;
      return;
    }
    const bool has_zeros = name.find('\0') != name.npos;
    const Key key(name, reinterpret_cast<const Byte*>(name.data() + name.size()), has_zeros);
    if (const auto found = words_.cache.find(key); found.ids) return take(found, batch, sum);
    const auto [entry, is_new] = batch.learned.try_emplace(name);
    const auto& [ids, quarter_nats] = entry->second;
    if (is_new) batch.unknown[combines].push_back(name);
    if (!quarter_nats) {
      sum.waits = true;
      return;
    }
    batch.append(ids.data(), ids.size());
    sum.add(quarter_nats);
    if (ids.size() <= UINT16_MAX) words_.cache.insert(key, {ids.data(), uint16_t(ids.size()), quarter_nats});
  }

  static void learn(Batch<Id>& batch, const py::function& encode_words) {
    for (const bool combines : {false, true}) {
      const auto names = std::exchange(batch.unknown[combines], {});
      if (names.empty()) continue;
      py::list words;
      for (const auto& name : names) words.append(py::str(name.substr(combines)));
      const py::tuple answer = encode_words(words, combines);
      const auto costs = answer[2].cast<std::vector<int64_t>>();
      if (costs.size() != names.size()) throw std::invalid_argument("not the costs of these words");
      Encoded<Id>(answer[0], answer[1], names.size()).each([&](size_t at, Ids found) {
        batch.learned[names[at]] = {std::move(found), std::max<uint16_t>(quarter_nats(costs[at]), 1)};
      });
    }
  }

  static void take_rounded(const py::list& texts, Batch<Id>& batch, const py::function& encode_texts) {
    if (batch.rounded.empty()) return;
    py::list asked;
    for (const size_t number : batch.rounded) asked.append(texts[number]);
    const py::tuple answer = encode_texts(asked);
    Encoded<Id>(answer[0], answer[1], asked.size()).each([&](size_t at, const Ids& found) {
      batch.slices[batch.rounded[at]] = {batch.ids.size(), found.size()};
      batch.append(found.data(), found.size());
    });
  }

  static py::tuple assembled(const Ids& all, const std::vector<typename Batch<Id>::Slice>& slices) {
    size_t total = 0;
    for (const auto& slice : slices) total += slice.count;
    py::array_t<Id> ids(static_cast<py::ssize_t>(total));
    py::array_t<uint32_t> counts(static_cast<py::ssize_t>(slices.size()));
    Id* to = ids.mutable_data();
    uint32_t* count = counts.mutable_data();
    for (const auto& slice : slices) {
      to = std::copy_n(all.data() + slice.start, slice.count, to);
      *count++ = uint32_t(slice.count);
    }
    return py::make_tuple(ids, counts);
  }

  Words<Id> words_;
  std::string combining_;
  Ids buffer_;
};

template <typename Id>
void define(py::module_& module, const char* name) {
  py::class_<Segmenter<Id>>(module, name)
      .def(py::init([](const std::vector<std::pair<py::bytes, uint32_t>>& pieces, const std::vector<int32_t>& costs,
                       int32_t unknown_cost, const py::bytes& table, const py::bytes& combining, size_t cache_bytes) {
        Pieces::Numbered numbered(pieces.begin(), pieces.end());
        return Segmenter<Id>(std::move(numbered), costs, unknown_cost, table, combining, cache_bytes);
      }))
      .def("encode", &Segmenter<Id>::encode)
      .def_property_readonly("num_words", &Segmenter<Id>::num_words)
      .def_property_readonly("num_bytes", &Segmenter<Id>::num_bytes);
}

}  // namespace

PYBIND11_MODULE(segmenter, module) {
  module.def("rules_keep_words_apart", [](const py::bytes& table) { return Rules(table).keep_words_apart(); });
  module.def("json_rows", &json_rows);
  define<uint16_t>(module, "Segmenter16");
  define<uint32_t>(module, "Segmenter32");
}
