// What an operator may believe: nothing. Index arrays come out of a package, so before a kernel follows them every length
// and every index is compared with what it points into. What was found right is remembered as long as its tensors live.
#pragma once

#include <ATen/ATen.h>

#include <bit>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace sparta_aot {

constexpr int64_t kMost = int64_t{1} << 31;        // of any single number
constexpr int64_t kMostFloats = int64_t{1} << 40;  // of any product of them

#define SPARTA_CHECK(condition, ...) TORCH_CHECK(condition, "sparta_aot: ", __VA_ARGS__)

// One index array: bytes with a type of our own.
template <class T>
struct Array {
  const T* data;
  int64_t count;

  Array(at::TensorList arrays, size_t place, int64_t least, const char* name) {
    const at::Tensor& array = arrays[place];
    SPARTA_CHECK(array.is_cpu() && array.is_contiguous(), name, " must be contiguous and on the CPU");
    SPARTA_CHECK(array.scalar_type() == at::kByte || array.numel() == 0, name, " must be bytes");
    SPARTA_CHECK(array.nbytes() % sizeof(T) == 0 || array.numel() == 0, name, " has a part of an element");
    count = array.numel() ? static_cast<int64_t>(array.nbytes() / sizeof(T)) : 0;
    data = count ? static_cast<const T*>(array.const_data_ptr()) : nullptr;
    SPARTA_CHECK(count >= least, name, " has ", count, " elements; at least ", least, " are read");
    SPARTA_CHECK(reinterpret_cast<uintptr_t>(data) % alignof(T) == 0, name, " is not aligned");
  }
  T operator[](int64_t place) const { return data[place]; }
};

inline void check_number(int64_t value, int64_t least, int64_t most, const char* name) {
  SPARTA_CHECK(least <= value && value <= most, name, " is ", value, "; allowed: ", least, " to ", most);
}

inline int64_t product(std::initializer_list<int64_t> factors, const char* name) {
  int64_t result = 1;
  for (const int64_t factor : factors) {
    SPARTA_CHECK(factor >= 0 && (factor == 0 || result <= kMostFloats / factor), name, " is too large");
    result *= factor;
  }
  return result;
}

// Running sums from 0 or more, never falling.
inline void check_running(const Array<int64_t>& sums, int64_t count, int64_t most, const char* name) {
  int64_t before = 0;
  for (int64_t i = 0; i < count; ++i) {
    SPARTA_CHECK(before <= sums[i] && sums[i] <= most, name, "[", i, "] is ", sums[i], "; allowed: ", before, " to ", most);
    before = sums[i];
  }
}

inline void check_costs(at::TensorList arrays, size_t place, int64_t blocks) {
  const Array<int64_t> costs(arrays, place, blocks + 1, "costs");
  check_running(costs, blocks + 1, kMostFloats, "costs");
  SPARTA_CHECK(blocks == 0 || costs[blocks] > 0, "costs end with 0");
}

inline void check_floats(const at::Tensor& tensor, int64_t least, const char* name) {
  SPARTA_CHECK(tensor.is_cpu() && tensor.scalar_type() == at::kFloat, name, " must be float32 on the CPU");
  SPARTA_CHECK(tensor.is_contiguous(), name, " must be contiguous");
  SPARTA_CHECK(tensor.numel() >= least, name, " has ", tensor.numel(), " values; at least ", least, " are read");
}

inline void check_bias(const std::optional<at::Tensor>& bias, int64_t channels, const char* name) {
  if (!bias) return;
  SPARTA_CHECK(bias->is_cpu() && bias->scalar_type() == at::kFloat, name, " must be float32 on the CPU");
  SPARTA_CHECK(bias->dim() == 1 && bias->size(0) == channels, name, " must be (", channels, ")");
}

inline void check_residual(const std::optional<at::Tensor>& residual, at::IntArrayRef sizes) {
  if (!residual) return;
  SPARTA_CHECK(residual->is_cpu() && residual->scalar_type() == at::kFloat, "the residual must be float32 on the CPU");
  SPARTA_CHECK(residual->sizes() == sizes, "the residual must be ", sizes);
}

// How many entries a panel has, and how many values.
struct Entries {
  int64_t offsets, values;
};

// The arrays of a panel: starts, offsets, rows, costs, in this order.
struct Panel {
  int64_t channels, groups, chunks, bn, mv, prefetch, interleave = 1;

  Entries check(at::TensorList arrays) const {
    check_number(channels, 0, kMost, "channels");
    check_number(groups, 0, kMost, "groups");
    check_number(chunks, 1, kMost, "chunks");
    check_number(prefetch, 0, kMost, "prefetch");
    check_number(interleave, 1, sparta::kQuadRows, "interleave");
    check_number(mv, 1, has_quads() ? sparta::kQuadVectors : sparta::kVectors, "mv");
    SPARTA_CHECK(bn == 1 || bn == 4 || bn == 8 || bn == 16, "a block of ", bn, " rows; allowed: 1, 4, 8 or 16");
    const Entries found = has_quads() ? check_quads(arrays) : check_groups(arrays);
    const int64_t ahead = std::max(prefetch, sparta::kSinglesAhead);
    const Array<uint32_t> offsets(arrays, 1, found.offsets ? found.offsets + ahead : 0, "offsets");
    const int64_t orders = has_quads() ? chunks : 1;  // every chunk of quads has its own
    const Array<int32_t> rows(arrays, 2, product({groups, orders}, "groups by chunks"), "rows");
    for (int64_t order = 0; order < orders; ++order) check_rows(rows, order * groups);
    check_costs(arrays, 3, sparta::ceil_div(channels, sparta::kBlockRows));
    return found;
  }

  bool has_quads() const { return interleave == sparta::kQuadRows; }
  int64_t quads() const { return sparta::ceil_div(groups, sparta::kQuadRows); }
  int64_t tile() const { return mv * sparta::kLanes; }

  // The first entry of a chunk, or the end of all.
  int64_t first_of(const Array<int64_t>& starts, int64_t chunk, int64_t entries) const {
    if (chunk == chunks) return entries;
    if (!has_quads()) return starts[chunk * groups];
    return groups ? starts[chunk * quads() * sparta::kQuadStarts] : 0;
  }

 private:
  Entries check_groups(at::TensorList arrays) const {
    const int64_t count = product({groups, chunks}, "groups by chunks");
    const Array<int64_t> starts(arrays, 0, count + 1, "starts");
    check_running(starts, count + 1, kMostFloats, "starts");
    return {starts[count], product({starts[count], bn}, "values")};
  }

  // A block of rows is written by its own groups, and each row by one of them: none is left as memory happened to be.
  void check_rows(const Array<int32_t>& rows, int64_t begin) const {
    const int64_t blocks = sparta::ceil_div(channels, sparta::kBlockRows), each = sparta::kBlockRows / bn;
    SPARTA_CHECK(groups <= blocks * each, groups, " groups for ", channels, " channels");
    std::vector<bool> seen(channels);
    int64_t written = 0;
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t row = rows[begin + group], first = group / each * sparta::kBlockRows;
      SPARTA_CHECK(first <= row && row + bn <= first + sparta::kBlockRows && row < channels && row % bn == 0, "rows[",
                   begin + group, "] is ", row);
      SPARTA_CHECK(bn != 16 || row == group * bn, "rows[", group, "] of groups of 16 rows is ", row);
      for (int64_t r = row; r < std::min(row + bn, channels); ++r) {
        written += !seen[r];
        seen[r] = true;
      }
    }
    SPARTA_CHECK(written == channels, "only ", written, " of ", channels, " channels are computed");
  }

  // Quads follow each other without a gap, and what lies in their lists is all that there is.
  Entries check_quads(at::TensorList arrays) const {
    SPARTA_CHECK(bn == 1 && groups == channels, "quads of blocks of ", bn, " rows in ", groups, " groups");
    const int64_t count = product({quads(), chunks}, "quads by chunks");
    const Array<int64_t> starts(arrays, 0, product({count, sparta::kQuadStarts}, "starts"), "starts");
    Entries found{0, 0};
    for (int64_t i = 0; i < count; ++i) {
      const int64_t* quad = starts.data + i * sparta::kQuadStarts;
      SPARTA_CHECK(quad[0] == found.offsets && quad[1] == found.values, "quad ", i, " begins elsewhere");
      uint16_t columns[sparta::kQuadLists];
      std::memcpy(columns, quad + 2, sizeof columns);
      const int64_t steps = sparta::kQuadRows * int64_t{columns[0]};  // one weight of each row
      found.offsets += steps;
      found.values += steps;
      for (int list = 1; list < sparta::kQuadLists; ++list) {
        const int rows = __builtin_popcount(list);
        SPARTA_CHECK(rows == 1 || columns[list] % 2 == 0, "quad ", i, " has a list of odd length");
        SPARTA_CHECK(rows <= 2 || mv <= sparta::kVectors || columns[list] == 0, "quad ", i, " has a list of ", rows, " rows");
        found.offsets += columns[list];
        found.values += rows * int64_t{columns[list]};
      }
      check_number(found.values, 0, kMostFloats, "values");
    }
    return found;
  }
};

// Offsets of entries that name whole input channels, those of a chunk within its columns.
inline void check_columns(const Panel& panel, at::TensorList arrays, const std::vector<int64_t>& columns, int64_t entries) {
  const Array<int64_t> starts(arrays, 0, 0, "starts");
  const Array<uint32_t> offsets(arrays, 1, 0, "offsets");
  const int64_t step = panel.tile() * int64_t{sizeof(float)};
  for (int64_t chunk = 0; chunk < panel.chunks; ++chunk) {
    const int64_t end = panel.first_of(starts, chunk + 1, entries);
    for (int64_t i = panel.first_of(starts, chunk, entries); i < end; ++i) {
      SPARTA_CHECK(offsets[i] % step == 0 && columns[chunk] <= offsets[i] / step && offsets[i] / step < columns[chunk + 1],
                   "offsets[", i, "] is ", offsets[i]);
    }
  }
}

template <class Index>
void check_indices(at::TensorList arrays, int64_t entries, int64_t inputs) {
  const Array<Index> indices(arrays, 1, entries, "indices");
  for (int64_t i = 0; i < entries; ++i) SPARTA_CHECK(indices[i] < inputs, "indices[", i, "] is ", int64_t{indices[i]});
}

// The arrays of a stream: starts, indices, step_starts, step_lanes, step_advances, costs. Arrays of forms that go by
// steps are loaded 16 at a time, also where fewer are used.
inline void check_stream(const sparta::StreamMatrix& matrix, at::TensorList arrays, int64_t values) {
  constexpr int64_t kLoaded = 16;
  check_number(matrix.channels, 0, kMost, "channels");
  check_number(matrix.groups, 0, kMost, "groups");
  check_number(matrix.prefetch, 0, kMost, "prefetch");
  SPARTA_CHECK(sparta::knows_stream(matrix), "the library was built for another processor than the model was packed for");
  SPARTA_CHECK(matrix.groups == sparta::ceil_div(matrix.channels, matrix.height), matrix.groups, " groups");
  const Array<int64_t> starts(arrays, 0, matrix.groups + 1, "starts");
  check_running(starts, matrix.groups + 1, kMostFloats, "starts");
  check_costs(arrays, 5, matrix.groups);
  const int64_t entries = starts[matrix.groups], chunks = sparta::ceil_div(matrix.inputs, sparta::kChunkInputs);
  if (matrix.form == sparta::kColumns || matrix.form == sparta::kRows) {
    SPARTA_CHECK(entries <= values / matrix.height, "values has ", values, " elements for ", entries, " entries");
    if (matrix.index_bytes == 2) return check_indices<uint16_t>(arrays, entries, matrix.inputs);
    return check_indices<uint32_t>(arrays, entries, matrix.inputs);
  }
  if (matrix.form == sparta::kBitmap) {
    const Array<uint16_t> lanes(arrays, 3, product({matrix.channels, 2, chunks}, "the bitmap"), "step_lanes");
    for (int64_t row = 0; row < matrix.channels; ++row) {
      int64_t at = starts[row];
      for (int64_t step = 0; step < 2 * chunks; ++step) {
        SPARTA_CHECK(at + kLoaded <= values, "row ", row, " has more values than there are");
        at += std::popcount(lanes[row * 2 * chunks + step]);
      }
    }
    return;
  }
  const Array<int64_t> steps(arrays, 2, matrix.groups + 1, "step_starts");
  check_running(steps, matrix.groups + 1, kMostFloats, "step_starts");
  const Array<uint16_t> lanes(arrays, 3, steps[matrix.groups], "step_lanes");
  const Array<uint8_t> advances(arrays, 4, steps[matrix.groups], "step_advances"), indices(arrays, 1, 0, "indices");
  for (int64_t group = 0; group < matrix.groups; ++group) {
    int64_t at = starts[group], chunk = 0;
    for (int64_t step = steps[group]; step < steps[group + 1]; ++step) {
      chunk += advances[step];
      SPARTA_CHECK(chunk < chunks && at + kLoaded <= std::min(values, indices.count), "step ", step, " reads too far");
      at += std::popcount(lanes[step]);
    }
  }
}

// Remembers which packed operands were looked at. A tensor that was freed is not found: only weak pointers are held.
class Checked {
 public:
  // Calls `look` unless the same tensors came with the same numbers before.
  template <class F>
  void once(at::TensorList operands, at::IntArrayRef numbers, F look) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Entry& entry = entries_[operands[0].unsafeGetTensorImpl()];
    if (entry.numbers == numbers && entry.holds(operands)) return;
    entry = {};
    look();
    if (entries_.size() > kMostEntries) entries_.clear();
    Entry fresh;
    fresh.numbers = numbers.vec();
    for (const at::Tensor& tensor : operands) {
      fresh.tensors.emplace_back(tensor.getIntrusivePtr());
      fresh.places.push_back(tensor.const_data_ptr());
    }
    entries_[operands[0].unsafeGetTensorImpl()] = std::move(fresh);
  }

 private:
  static constexpr size_t kMostEntries = 4096;
  struct Entry {
    std::vector<int64_t> numbers;
    std::vector<c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>> tensors;
    std::vector<const void*> places;

    bool holds(at::TensorList operands) const {
      if (operands.size() != tensors.size()) return false;
      for (size_t i = 0; i < tensors.size(); ++i) {
        const auto alive = tensors[i].lock();
        if (!alive || alive.get() != operands[i].unsafeGetTensorImpl()) return false;
        if (operands[i].const_data_ptr() != places[i]) return false;
      }
      return true;
    }
  };
  std::mutex mutex_;
  std::unordered_map<at::TensorImpl*, Entry> entries_;
};

}  // namespace sparta_aot
