// Reads lines of JSON of the usual form into rows: objects whose values are strings, and an id that may be a number.
//
// Other lines are left to Python, and so is every line that may not be valid, so that errors are the same.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <string_view>

#include "word.h"

namespace py = pybind11;

// Parses one line. Each function returns false if the line is of another form.
class JsonLine {
 public:
  JsonLine(const Byte* begin, const Byte* end) : at_(begin), end_(end) {}

  // Parses the line, and returns a Passage: id, title, text. A null object stands for a line of another form.
  py::object passage(const py::object& type, const py::str& file, int64_t row) {
    py::object id, title, text;
    if (!skip('{')) return {};
    do {
      std::string_view key;
      if (!skip('"') || !plain_string(key) || !skip(':')) return {};
      py::object* value = key == "id" ? &id : key == "title" ? &title : key == "text" ? &text : nullptr;
      py::object other;  // of several values of a key, the last one counts
      if (!(skip('"') ? string(value ? *value : other) : value == &id && number(id))) return {};
    } while (skip(','));
    if (!skip('}') || (skip_spaces(), at_ != end_) || !text) return {};
    if (!id) id = py::reinterpret_steal<py::object>(PyUnicode_FromFormat("%U:%lld", file.ptr(), (long long)row));
    if (!has_visible_ascii(id)) return {};
    if (!title) title = py::str();
    return tuple_of(type, std::move(id), std::move(title), std::move(text));
  }

  // Makes an object of a subclass of tuple without more attributes, as NamedTuple makes them.
  template <typename... Items>
  static py::object tuple_of(const py::object& type, Items... items) {
    auto* object_type = reinterpret_cast<PyTypeObject*>(type.ptr());
    auto made = py::reinterpret_steal<py::object>(object_type->tp_alloc(object_type, sizeof...(items)));
    if (!made) throw py::error_already_set();
    Py_ssize_t at = 0;
    (PyTuple_SET_ITEM(made.ptr(), at++, items.release().ptr()), ...);
    return made;
  }

 private:
  void skip_spaces() {
    while (at_ < end_ && (*at_ == ' ' || *at_ == '\t' || *at_ == '\r')) at_++;
  }

  bool skip(Byte expected) {
    skip_spaces();
    if (at_ == end_ || *at_ != expected) return false;
    at_++;
    return true;
  }

  // Goes to the first byte that is a quote, a backslash, a control character or not ASCII. Eight bytes are tested at a
  // time: one that is looked for borrows into its highest bit. Only bits above the lowest one can be wrong.
  void skip_ordinary() {
    constexpr uint64_t ones = 0x0101010101010101, high = 0x8080808080808080;
    for (; end_ - at_ >= 8; at_ += 8) {
      const uint64_t bytes = load(at_, 8, end_);
      const uint64_t quotes = bytes ^ '"' * ones, slashes = bytes ^ '\\' * ones;
      const uint64_t found = ((bytes - 0x20 * ones) | (quotes - ones) | (slashes - ones) | bytes) & high;
      if (!found) continue;
      at_ += __builtin_ctzll(found) / 8;
      return;
    }
    while (at_ < end_ && *at_ >= 0x20 && *at_ < 0x80 && *at_ != '"' && *at_ != '\\') at_++;
  }

  // Reads a string of ASCII without escapes to its closing quote.
  bool plain_string(std::string_view& found) {
    const Byte* begin = at_;
    skip_ordinary();
    if (at_ == end_ || *at_ != '"') return false;
    found = {reinterpret_cast<const char*>(begin), size_t(at_++ - begin)};
    return true;
  }

  bool string(py::object& found) {
    const Byte* begin = at_;
    bool is_ascii = true;
    decoded_.clear();
    for (;;) {
      skip_ordinary();
      if (at_ == end_ || *at_ < 0x20) return false;
      if (*at_ == '"') break;
      if (*at_ == '\\') {
        decoded_.append(reinterpret_cast<const char*>(begin), size_t(at_ - begin));
        if (!escape(is_ascii)) return false;
        begin = at_;
      }
      for (; at_ < end_ && *at_ >= 0x80; at_++) is_ascii = false;
    }
    std::string_view text(reinterpret_cast<const char*>(begin), size_t(at_++ - begin));
    if (!decoded_.empty()) text = decoded_.append(text);
    found = python_string(text, is_ascii);
    return bool(found);
  }

  static py::object python_string(std::string_view text, bool is_ascii) {
    PyObject* made = nullptr;
    if (is_ascii) {
      made = PyUnicode_New(Py_ssize_t(text.size()), 0x7f);
      if (made) std::memcpy(PyUnicode_DATA(made), text.data(), text.size());
      if (!made) throw py::error_already_set();
    } else {
      made = PyUnicode_DecodeUTF8(text.data(), Py_ssize_t(text.size()), "strict");
      if (!made) PyErr_Clear();  // Python reads the line again, and reports it
    }
    return py::reinterpret_steal<py::object>(made);
  }

  bool escape(bool& is_ascii) {
    if (end_ - at_ < 2) return false;
    constexpr std::string_view names = "\"\\/bfnrt", values = "\"\\/\b\f\n\r\t";
    const Byte name = at_[1];
    at_ += 2;
    if (const size_t place = names.find(char(name)); place != names.npos) {
      decoded_ += values[place];
      return true;
    }
    uint32_t code = 0, low = 0;
    if (name != 'u' || !hexadecimal(code)) return false;
    if (code >= 0xd800 && code < 0xe000) {
      if (code >= 0xdc00 || end_ - at_ < 2 || at_[0] != '\\' || at_[1] != 'u') return false;
      at_ += 2;
      if (!hexadecimal(low) || low < 0xdc00 || low >= 0xe000) return false;
      code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    }
    append_character(code);
    is_ascii &= code < 0x80;
    return true;
  }

  bool hexadecimal(uint32_t& found) {
    if (end_ - at_ < 4) return false;
    for (const Byte* last = at_ + 4; at_ < last; at_++) {
      const Byte digit = *at_;
      if (digit >= '0' && digit <= '9') found = found << 4 | (digit - '0');
      else if ((digit | 0x20) >= 'a' && (digit | 0x20) <= 'f') found = found << 4 | ((digit | 0x20) - 'a' + 10);
      else return false;
    }
    return true;
  }

  void append_character(uint32_t code) {
    if (code < 0x80) {
      decoded_ += char(code);
      return;
    }
    const int following = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    decoded_ += char((0xff00 >> (following + 1) & 0xff) | code >> 6 * following);
    for (int at = following - 1; at >= 0; at--) decoded_ += char(0x80 | (code >> 6 * at & 0x3f));
  }

  // A whole number that Python writes with the same digits.
  bool number(py::object& found) {
    skip_spaces();
    const Byte* begin = at_;
    while (at_ < end_ && *at_ >= '0' && *at_ <= '9') at_++;
    const size_t size = size_t(at_ - begin);
    if (size == 0 || size > 18 || (size > 1 && *begin == '0')) return false;
    if (at_ < end_ && (*at_ == '.' || *at_ == 'e' || *at_ == 'E')) return false;
    found = python_string({reinterpret_cast<const char*>(begin), size}, true);
    return true;
  }

  static bool has_visible_ascii(const py::object& id) {
    Py_ssize_t size = 0;
    const char* bytes = PyUnicode_AsUTF8AndSize(id.ptr(), &size);
    if (!bytes) throw py::error_already_set();
    return std::any_of(bytes, bytes + size, [](char one) { return one > ' ' && one < 0x7f; });
  }

  const Byte *at_, *end_;
  std::string decoded_;
};

// Parses lines of `block` from byte `start` until one is incomplete or of another form. The first line is row `number`
// of a file, and begins at byte `offset`. Returns rows, and where in the block the first line begins that is none.
inline py::tuple json_rows(const py::bytes& block, size_t start, const py::str& file, int64_t number, int64_t offset,
                           const py::object& row_type, const py::object& passage_type) {
  const std::string_view bytes = block;
  py::list rows;
  while (start < bytes.size()) {
    const size_t end = bytes.find('\n', start);
    if (end == bytes.npos) break;
    const auto* begin = reinterpret_cast<const Byte*>(bytes.data());
    py::object passage = JsonLine(begin + start, begin + end).passage(passage_type, file, number);
    if (!passage) break;
    rows.append(JsonLine::tuple_of(row_type, py::object(py::int_(number++)), py::object(py::int_(offset)), passage));
    offset += int64_t(end + 1 - start);
    start = end + 1;
  }
  return py::make_tuple(rows, start);
}
