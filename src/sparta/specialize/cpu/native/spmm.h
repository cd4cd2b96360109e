// y = x W^T for many tokens: vectors run along tokens, weights are broadcast. A group of BN output channels shares one
// list of input channels; every entry loads MV vectors of activations and multiplies each with BN weights. Processors
// load one or two wide vectors a cycle and multiply two, so a tile is good when MV * BN multiplications pay for its
// MV + BN loads, and an unstructured weight (BN = 1) gains by interleaving rows and by loading four of its values at once.
#pragma once

#include "finish.h"
#include "panel.h"
#include "quads.h"
#include "threads.h"

namespace sparta {

// Work is cut between threads, and rows are sorted by length, in blocks of this many.
constexpr int64_t kBlockRows = 32;
// So many blocks are computed, then finished and stored: few enough for the caches, and enough to write long runs.
constexpr int64_t kBlocksTogether = 4;
// Entries of a single row that are asked for ahead; lists of offsets are padded by at least as many.
constexpr int64_t kSinglesAhead = 8;
// Groups whose output is asked for ahead where rows lie far apart.
constexpr int64_t kGroupsAhead = 4;

// A packed weight. Entry lists are stored chunk by chunk of the input channels; list (chunk, group) holds the entries
// starts[chunk * groups + group] up to the next start. Entries have one byte offset into a panel tile and BN values.
// Where four rows are interleaved, they are a quad with kQuadStarts numbers in `starts`, chunk by chunk.
struct PanelMatrix {
  int64_t channels;  // N
  int64_t inputs;    // K
  int64_t groups;
  int64_t chunks;
  const int64_t* starts;         // [chunks * groups + 1], or [chunks][quads][kQuadStarts]
  const uint32_t* offsets;       // [entries], input channel * tile * 4
  const float* values;           // [entries][bn]
  const int32_t* rows;           // [groups], the first output channel of each; of quads' rows [chunks][groups]
  const int64_t* costs;          // [blocks + 1], running sums
  const int64_t* chunk_columns;  // [chunks + 1]
  int32_t bn;
  int32_t mv;
  int32_t interleave;
  int32_t prefetch;  // entries ahead; 0 for none
};

// The same for tokens that may lie in panels, which have no stride.
struct PanelCall : StreamCall {
  int32_t x_is_panel;
  int32_t y_is_panel;
};
static_assert(sizeof(PanelCall) == sizeof(StreamCall) + 2 * sizeof(int32_t), "the bytes that Python packs");

// One block of rows, one chunk of columns.
struct RowsTask {
  const PanelMatrix* matrix;
  int64_t chunk;
  int64_t group_begin;
  int64_t group_end;
  const float* x;     // the first token; offsets count from here
  float* y;           // the same token of the output, at row `first_row`
  int64_t first_row;
  int64_t y_stride;   // floats between two rows
  const RowsFinish* finish;  // null stores the sums as they are
  bool far = false;          // whether rows of the output lie far apart, where the processor does not look by itself
  const PixelLanes* pixels = nullptr;  // of each vector, and of the tail; null where finished sums stay at `y`
  float* image = nullptr;              // else, pixel 0 in row `first_row`; the residual begins there as well
  int64_t plane = 0;                   // floats between two rows of it
};

// One entry of a group: MV vectors of inputs times BN weights.
template <int BN, int MV>
SPARTA_INLINE void multiply_entry(const float* values, const Vec (&inputs)[MV], Vec (&sums)[BN][MV]) {
  // Narrow tiles of the widest vectors wait for loads: of every four weights, two come with one load and are spread by
  // the shuffle unit.
  constexpr bool kSpread = kLanes == 16 && BN % 4 == 0 && MV <= 2;
#pragma GCC unroll 8
  for (int r = 0; r < BN; ++r) {
    const Vec weight = kSpread && r % 4 >= 2 ? pick(load_four(values + r / 4 * 4), r % 4) : splat(values[r]);
#pragma GCC unroll 8
    for (int j = 0; j < MV; ++j) sums[r][j] += weight * inputs[j];
  }
}

// Tokens behind the last vector of a tile, for BN rows at once: a few of them take less time than a vector of their own.
template <int BN, int Tail>
struct Tails {
  using Rows = typename Vector<BN>::floats;
  Rows sums[Tail] = {};
  SPARTA_INLINE void multiply(const float* values, const float* tokens) {
    const Rows weights = load<Rows>(values);
#pragma GCC unroll 4
    for (int t = 0; t < Tail; ++t) sums[t] += weights * tokens[t];
  }
};

template <int BN>
struct Tails<BN, 0> {
  SPARTA_INLINE void multiply(const float*, const float*) {}
};

template <int BN, int MV, bool Prefetch, int Tail>
SPARTA_INLINE void multiply(const float* x, const uint32_t* offsets, const float* values, int64_t entries,
                            int64_t ahead, Vec (&sums)[BN][MV], Tails<BN, Tail>& tails) {
  int64_t i = 0;
  if constexpr (BN == 1) {
    for (; i + 4 <= entries; i += 4) {
      const Vec four = load_four(values + i);
#pragma GCC unroll 2
      for (int n = 0; n < 4; n += 2) {
        // One line only: a single row waits for its loads, and asking is one more; the processor finds the others.
        if constexpr (Prefetch) __builtin_prefetch(at_offset(x, offsets[i + n + kSinglesAhead]));
        if constexpr (Prefetch) __builtin_prefetch(at_offset(x, offsets[i + n + 1 + kSinglesAhead]));
        const TwoOffsets two(offsets + i + n);
        multiply_single<MV>(at_offset(x, two.first()), pick(four, n), sums[0]);
        multiply_single<MV>(at_offset(x, two.second()), pick(four, n + 1), sums[0]);
      }
    }
  }
  for (; i < entries; ++i) {
    const float* from = at_offset(x, offsets[i]);
    if constexpr (Prefetch && BN > 1) {
      const float* later = at_offset(x, offsets[i + ahead]);
#pragma GCC unroll 4
      for (int j = 0; j < MV; ++j) __builtin_prefetch(later + j * kLanes);
    }
    if constexpr (BN > 1) __builtin_prefetch(values + i * BN + kWeightsAhead);
    Vec inputs[MV];
#pragma GCC unroll 8
    for (int j = 0; j < MV; ++j) inputs[j] = load(from + j * kLanes);
    multiply_entry<BN, MV>(values + i * BN, inputs, sums);
    tails.multiply(values + i * BN, from + MV * kLanes);
  }
}

// Asks for a row of the output before its sums are computed, so that storing them does not wait.
template <int MV>
SPARTA_INLINE void announce(const float* y) {
#pragma GCC unroll 8
  for (int j = 0; j < MV; ++j) __builtin_prefetch(y + j * kLanes, 1);
}

// Asks for a row long before it is needed, from the second level of caches on.
template <int MV>
SPARTA_INLINE void announce_early(const void* row) {
#pragma GCC unroll 8
  for (int j = 0; j < MV; ++j) __builtin_prefetch(static_cast<const float*>(row) + j * kLanes, 0, 2);
}

// Asks for a stream of weights ahead of its use. Processors do so by themselves up to the end of a page, and a large
// network reads pages by the thousand.
class StreamAhead {
 public:
  static constexpr int64_t kBytes = 2048;
  explicit StreamAhead(const void* begin) : asked_(static_cast<const char*>(begin)) {}
  // Everything up to kBytes after `end`, which is where the next weights end.
  SPARTA_INLINE void ask(const void* end) {
    for (; asked_ < static_cast<const char*>(end) + kBytes; asked_ += 64) __builtin_prefetch(asked_);
  }

 private:
  const char* asked_;
};

// A row of the output and of the residual, long before it is computed.
template <int MV>
SPARTA_INLINE void announce_row(const RowsTask& task, int64_t row) {
  const int64_t stride = task.pixels ? task.plane : task.y_stride, first = task.pixels ? task.pixels->pixel : 0;
  const int64_t at = (row - task.first_row) * stride + first;
  announce_early<MV>((task.pixels ? task.image : task.y) + at);
  if (task.finish && task.finish->residual) announce_early<MV>(task.finish->residual + at);
}

// The rows of a later group.
template <int BN, int MV>
SPARTA_INLINE void announce_group(const RowsTask& task, int64_t group) {
  if (group >= task.group_end) return;
#pragma GCC unroll 8
  for (int r = 0; r < BN; ++r) announce_row<MV>(task, task.matrix->rows[group] + r);
}

// Finished sums on their way to the pixels of an image.
template <int MV>
SPARTA_INLINE void put_pixels(const RowsTask& task, int64_t row, const float* y, const Vec (&sums)[MV]) {
  const RowEnd<Vec> end(*task.finish, row);
  const int64_t at = (row - task.first_row) * task.plane;
  const float* residual = task.finish->residual ? task.finish->residual + at : nullptr;
  float* image = task.image + at;
#pragma GCC unroll 8
  for (int j = 0; j < MV; ++j) {
    const PixelLanes& pixels = task.pixels[j];
    const Vec sum = together(task.chunk > 0 ? sums[j] + load(y + j * kLanes) : sums[j], pixels.lanes);
    Vec out = end.before(sum);
    if (residual) out += load_some(residual + pixels.pixel, pixels.count);
    store_some(image + pixels.pixel, end.after(out), pixels.count);
  }
}

// The first chunk sets the output, later ones add to it; the last one may finish it.
template <int MV>
SPARTA_INLINE void put(const RowsTask& task, int64_t row, float* y, const Vec (&sums)[MV]) {
  const bool adds = task.chunk > 0;
  if (task.finish && task.pixels) return put_pixels<MV>(task, row, y, sums);
  if (task.finish) {
    const RowEnd<Vec> end(*task.finish, row);
    const float* residual = task.finish->residual ? task.finish->residual + (y - task.y) : nullptr;
#pragma GCC unroll 8
    for (int j = 0; j < MV; ++j) {
      Vec out = end.before(adds ? sums[j] + load(y + j * kLanes) : sums[j]);
      if (residual) out += load(residual + j * kLanes);
      store(y + j * kLanes, end.after(out));
    }
    return;
  }
#pragma GCC unroll 8
  for (int j = 0; j < MV; ++j) store(y + j * kLanes, adds ? sums[j] + load(y + j * kLanes) : sums[j]);
}

// The same for the tokens of one row behind its vectors; `y` is at the first.
template <int MV, int BN, int Tail>
SPARTA_INLINE void put_tail(const RowsTask& task, int64_t row, float* y, const Tails<BN, Tail>& tails, int which) {
  using Tokens = typename Vector<Tail>::floats;
  Tokens sum;
#pragma GCC unroll 4
  for (int t = 0; t < Tail; ++t) sum[t] = tails.sums[t][which];
  if (task.chunk > 0) sum += load<Tokens>(y);
  if (task.finish) {
    const RowEnd<Tokens> end(*task.finish, row);
    const float* residual = task.finish->residual;
    const int64_t at = task.pixels ? (row - task.first_row) * task.plane + task.pixels[MV].pixel : y - task.y;
    sum = end.before(sum);
    if (residual) sum += load<Tokens>(residual + at);
    sum = end.after(sum);
    if (task.pixels) y = task.image + at;
  }
  store(y, sum);
}

template <int BN, int MV, bool Prefetch, int Tail = 0>
void multiply_groups(const RowsTask& task) {
  const PanelMatrix& matrix = *task.matrix;
  const int64_t* starts = matrix.starts + task.chunk * matrix.groups;
  StreamAhead weights(matrix.values + starts[task.group_begin] * BN);
  for (int64_t group = task.group_begin; group < task.group_end; ++group) {
    const int64_t begin = starts[group];
    const int64_t row = matrix.rows[group];
    float* y = task.y + (row - task.first_row) * task.y_stride;
#pragma GCC unroll 8
    for (int r = 0; r < BN; ++r) announce<MV>(y + r * task.y_stride);
    if (task.far) {
      announce_group<BN, MV>(task, group + kGroupsAhead);
      weights.ask(matrix.values + starts[group + 1] * BN);
    }
    Vec sums[BN][MV] = {};
    Tails<BN, Tail> tails;
    multiply<BN, MV, Prefetch>(task.x, matrix.offsets + begin, matrix.values + begin * BN, starts[group + 1] - begin,
                               matrix.prefetch, sums, tails);
#pragma GCC unroll 8
    for (int r = 0; r < BN; ++r) {
      if (BN > 1 && row + r >= matrix.channels) break;
      put<MV>(task, row + r, y + r * task.y_stride, sums[r]);
      if constexpr (Tail > 0) put_tail<MV>(task, row + r, y + r * task.y_stride + MV * kLanes, tails, r);
    }
  }
}

// Two rows of about the same length; what one has more than the other is added row by row.
template <int MV>
void multiply_interleaved(const RowsTask& task) {
  constexpr int kRows = 2;
  const PanelMatrix& matrix = *task.matrix;
  const int64_t* starts = matrix.starts + task.chunk * matrix.groups;
  int64_t group = task.group_begin;
  for (; group + kRows <= task.group_end; group += kRows) {
    const uint32_t* offsets[kRows];
    const float* values[kRows];
    float* y[kRows];
    Vec sums[kRows][1][MV] = {};
#pragma GCC unroll 2
    for (int r = 0; r < kRows; ++r) {
      y[r] = task.y + (matrix.rows[group + r] - task.first_row) * task.y_stride;
      announce<MV>(y[r]);
      offsets[r] = matrix.offsets + starts[group + r];
      values[r] = matrix.values + starts[group + r];
    }
    const int64_t common = std::min(starts[group + 1] - starts[group], starts[group + 2] - starts[group + 1]) / 4 * 4;
    for (int64_t i = 0; i < common; i += 4) {
      const Vec fours[kRows] = {load_four(values[0] + i), load_four(values[1] + i)};
#pragma GCC unroll 2
      for (int n = 0; n < 4; n += 2) {
        const TwoOffsets one(offsets[0] + i + n), two(offsets[1] + i + n);
        // By turns, so that no sum waits for itself.
        multiply_single<MV>(at_offset(task.x, one.first()), pick(fours[0], n), sums[0][0]);
        multiply_single<MV>(at_offset(task.x, two.first()), pick(fours[1], n), sums[1][0]);
        multiply_single<MV>(at_offset(task.x, one.second()), pick(fours[0], n + 1), sums[0][0]);
        multiply_single<MV>(at_offset(task.x, two.second()), pick(fours[1], n + 1), sums[1][0]);
      }
    }
#pragma GCC unroll 2
    for (int r = 0; r < kRows; ++r) {
      const int64_t rest = starts[group + r + 1] - starts[group + r] - common;
      Tails<1, 0> none;
      multiply<1, MV, false>(task.x, offsets[r] + common, values[r] + common, rest, 0, sums[r], none);
      put<MV>(task, matrix.rows[group + r], y[r], sums[r][0]);
    }
  }
  RowsTask rest = task;
  rest.group_begin = group;
  multiply_groups<1, MV, false>(rest);
}

// Four rows at once, of which the last quad may lack some.
template <int MV>
void multiply_quads(const RowsTask& task) {
  const PanelMatrix& matrix = *task.matrix;
  const int64_t* starts = matrix.starts + task.chunk * ceil_div(matrix.groups, kQuadRows) * kQuadStarts;
  const int32_t* order = matrix.rows + task.chunk * matrix.groups;
  for (int64_t group = task.group_begin; group < task.group_end; group += kQuadRows) {
    const int64_t rows = std::min<int64_t>(kQuadRows, matrix.groups - group);
    float* y[kQuadRows];
    for (int64_t r = 0; r < rows; ++r) {
      y[r] = task.y + (order[group + r] - task.first_row) * task.y_stride;
      announce<MV>(y[r]);
      const int64_t later = group + kGroupsAhead + r;
      if (task.far && later < task.group_end) announce_row<MV>(task, order[later]);
    }
    Vec sums[kQuadRows][MV];
    multiply_quad<MV>(task.x, starts + group / kQuadRows * kQuadStarts, matrix.offsets, matrix.values, sums);
#pragma GCC unroll 4
    for (int r = 0; r < kQuadRows; ++r) {
      if (r < rows) put<MV>(task, order[group + r], y[r], sums[r]);
    }
  }
}

using RowsKernel = void (*)(const RowsTask&);

template <int BN, int MV, int Tail>
RowsKernel find_kernel_of(bool prefetch) {
  return prefetch ? multiply_groups<BN, MV, true, Tail> : multiply_groups<BN, MV, false, Tail>;
}

template <int MV, int Tail>
RowsKernel find_kernel_for(int32_t bn, int32_t interleave, bool prefetch) {
  if constexpr (Tail == 0) {
    if (bn == 1) {
      if (interleave == 1) return find_kernel_of<1, MV, 0>(prefetch);
      if (interleave == 2 && !prefetch) return multiply_interleaved<MV>;
      if (interleave == kQuadRows && !prefetch) return multiply_quads<MV>;
    }
  }
  if (interleave != 1) return nullptr;
  if (bn == 4) return find_kernel_of<4, MV, Tail>(prefetch);
  if constexpr (MV <= 3) {
    if (bn == 8) return find_kernel_of<8, MV, Tail>(prefetch);
  }
  return nullptr;
}

template <int Tail>
RowsKernel find_kernel_for(int32_t bn, int64_t mv, int32_t interleave, bool prefetch) {
  switch (mv) {
    case 1: return find_kernel_for<1, Tail>(bn, interleave, prefetch);
    case 2: return find_kernel_for<2, Tail>(bn, interleave, prefetch);
    case 3: return find_kernel_for<3, Tail>(bn, interleave, prefetch);
    case 4: return find_kernel_for<4, Tail>(bn, interleave, prefetch);
    default: return nullptr;
  }
}

// Tiles that only quads are wide enough for.
inline RowsKernel find_wide_quads(int64_t mv) {
  switch (mv) {
    case 5: return multiply_quads<5>;
    case 6: return multiply_quads<6>;
    case kQuadVectors: return multiply_quads<kQuadVectors>;
    default: return nullptr;
  }
}

// Null for a tile that this library does not hold. Square images leave 1, 4 or 9 tokens behind their vectors.
inline RowsKernel find_kernel(int32_t bn, int64_t mv, int32_t interleave, bool prefetch, int64_t tail = 0) {
  if (mv > kVectors) {
    const bool quads = bn == 1 && interleave == kQuadRows && !prefetch && tail == 0;
    return quads ? find_wide_quads(mv) : nullptr;
  }
  switch (tail) {
    case 0: return find_kernel_for<0>(bn, mv, interleave, prefetch);
    case 1: return find_kernel_for<1>(bn, mv, interleave, prefetch);
    case 4: return find_kernel_for<4>(bn, mv, interleave, prefetch);
    default: return nullptr;
  }
}

// The blocks [begin, end) of one tile of tokens; false when memory ran out.
inline bool multiply_tile(const PanelMatrix& matrix, const PanelCall& call, int64_t index, int64_t begin, int64_t end) {
  static thread_local Scratch input_scratch, output_scratch;
  const int64_t tile = matrix.mv * kLanes;
  const int64_t tokens = std::min(tile, call.tokens - index * tile);
  const int64_t vectors = ceil_div(tokens, kLanes);
  const RowsKernel kernel = find_kernel(matrix.bn, vectors, matrix.interleave, matrix.prefetch > 0);

  // One chunk of the input is packed at a time, over the one before, which stays in the cache so.
  int64_t columns = 0;
  for (int64_t chunk = 0; chunk < matrix.chunks; ++chunk) {
    columns = std::max(columns, matrix.chunk_columns[chunk + 1] - matrix.chunk_columns[chunk]);
  }
  float* packed = call.x_is_panel ? nullptr : input_scratch.get(columns * tile);
  if (!call.x_is_panel && !packed && columns > 0) return false;
  // With several chunks every row must wait for the last one; with one, a block at a time is enough.
  const int64_t scratch_rows = (matrix.chunks > 1 ? end - begin : kBlocksTogether) * kBlockRows;
  float* sums = call.y_is_panel ? nullptr : output_scratch.get(scratch_rows * tile);
  if (!call.y_is_panel && !sums) return false;
  float* y_panel = call.y_is_panel ? call.y + index * matrix.channels * tile : nullptr;

  Epilogue epilogue{call.bias, call.residual, call.residual_stride, call.activation};
  const bool identity = !call.bias && !call.residual && call.activation == kNone;
  if (call.residual) epilogue.residual += index * tile * (call.y_is_panel ? matrix.channels : call.residual_stride);

  for (int64_t chunk = 0; chunk < matrix.chunks; ++chunk) {
    const float* x = call.x + index * matrix.inputs * tile;
    if (!call.x_is_panel) {
      const int64_t first = matrix.chunk_columns[chunk];
      pack_tile(call.x + index * tile * call.x_stride, call.x_stride, tokens, first, matrix.chunk_columns[chunk + 1],
                tile, packed);
      x = packed - first * tile;  // offsets count from column 0
    }
    for (int64_t block = begin; block < end; block += kBlocksTogether) {
      const int64_t blocks = std::min(kBlocksTogether, end - block);
      const int64_t row = block * kBlockRows;
      const int64_t rows = std::min(blocks * kBlockRows, matrix.channels - row);
      float* y = y_panel ? y_panel + row * tile : sums + (matrix.chunks > 1 ? row - begin * kBlockRows : 0) * tile;
      const int64_t groups_each = kBlockRows / matrix.bn;
      kernel(RowsTask{&matrix, chunk, block * groups_each, std::min((block + blocks) * groups_each, matrix.groups), x,
                      y, row, tile, nullptr});
      if (chunk + 1 < matrix.chunks || (y_panel && identity)) continue;
      with_activation(call.activation, [&](auto tag) {
        constexpr Activation act = decltype(tag)::value;
        if (y_panel) {
          const float* residual = epilogue.residual ? epilogue.residual + row * tile : nullptr;
          finish_rows<act>(y, tile, row, rows, vectors, call.bias, residual);
        } else {
          unpack_rows<act>(y, tile, row, rows, tokens, epilogue, call.y + index * tile * call.y_stride, call.y_stride);
        }
      });
    }
  }
  return true;
}

// Shares (tile, block of rows) pairs among threads by cost: calls f(tile, first block, last block), which returns false
// when memory ran out. A tile that two threads share is packed by both, which costs less than waiting for each other.
template <class F>
inline bool share_tiles(const PanelMatrix& matrix, int64_t tiles, int32_t threads, F f) {
  const int64_t blocks = ceil_div(matrix.channels, kBlockRows);
  bool enough_memory = true;
  parallel(threads, [&](int64_t index, int64_t count) {
    int64_t at = share_begin(matrix.costs, blocks, tiles, index, count);
    const int64_t end = share_begin(matrix.costs, blocks, tiles, index + 1, count);
    while (at < end) {
      const int64_t tile = at / blocks;
      const int64_t stop = std::min(end, (tile + 1) * blocks);
      if (!f(tile, at - tile * blocks, stop - tile * blocks)) {
#pragma omp atomic write
        enough_memory = false;
        return;
      }
      at = stop;
    }
  });
  return enough_memory;
}

inline bool multiply_panels(const PanelMatrix& matrix, const PanelCall& call) {
  const int64_t tiles = ceil_div(call.tokens, matrix.mv * kLanes);
  return share_tiles(matrix, tiles, call.threads, [&](int64_t tile, int64_t begin, int64_t end) {
    return multiply_tile(matrix, call, tile, begin, end);
  });
}

// Token-major to panels, tile by tile.
inline void pack_panels(const float* x, int64_t stride, int64_t tokens, int64_t channels, int64_t mv, float* panel,
                        int32_t threads) {
  const int64_t tile = mv * kLanes, tiles = ceil_div(tokens, tile);
  parallel(threads, [&](int64_t index, int64_t count) {
    for (int64_t i = tiles * index / count; i < tiles * (index + 1) / count; ++i) {
      const int64_t present = std::min(tile, tokens - i * tile);
      pack_tile(x + i * tile * stride, stride, present, 0, channels, tile, panel + i * channels * tile);
    }
  });
}

}  // namespace sparta
