// The C interface of the CPU kernels: plain structures and pointers, no exceptions, an error code for what this library
// does not hold. It is compiled once for each instruction set; the caller loads the one that fits the machine.
#include "bf16.h"
#include "bf16_conv.h"
#include "bf16_depthwise.h"
#include "chain.h"
#include "conv.h"
#include "dense_conv.h"
#include "depthwise.h"
#include "decode_greedy.h"
#include "gemv.h"
#include "generated.h"
#include "int8.h"
#include "int8_conv.h"
#include "int8_depthwise.h"
#include "pool.h"
#include "short_stream.h"
#include "spmm.h"

#define SPARTA_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

enum Result : int { kDone = 0, kUnknownTile = 1, kNoMemory = 2 };

}  // namespace

SPARTA_EXPORT int sparta_lanes() { return sparta::kLanes; }

SPARTA_EXPORT int sparta_has_tile(int bn, int mv, int interleave, int prefetch) {
  for (int vectors = 1; vectors <= mv; ++vectors) {  // the last tile of tokens may be narrower
    if (!sparta::find_kernel(bn, vectors, interleave, prefetch > 0)) return 0;
  }
  return mv >= 1;
}

SPARTA_EXPORT int sparta_multiply_panels(const sparta::PanelMatrix* matrix, const sparta::PanelCall* call) {
  if (!sparta_has_tile(matrix->bn, matrix->mv, matrix->interleave, matrix->prefetch)) return kUnknownTile;
  if (call->tokens <= 0 || matrix->channels <= 0) return kDone;
  return sparta::multiply_panels(*matrix, *call) ? kDone : kNoMemory;
}

SPARTA_EXPORT int sparta_multiply_stream(const sparta::StreamMatrix* matrix, const sparta::StreamCall* call) {
  if (!sparta::knows_stream(*matrix)) return kUnknownTile;
  if (call->tokens <= 0 || matrix->channels <= 0) return kDone;
  return sparta::multiply_stream(*matrix, *call) ? kDone : kNoMemory;
}

SPARTA_EXPORT int sparta_multiply_conv(const sparta::PanelMatrix* matrix, const sparta::ConvCall* call) {
  if (!sparta_has_tile(matrix->bn, matrix->mv, matrix->interleave, matrix->prefetch)) return kUnknownTile;
  if (call->images <= 0 || matrix->channels <= 0) return kDone;
  return sparta::multiply_conv(*matrix, *call) ? kDone : kNoMemory;
}

SPARTA_EXPORT int sparta_dense_conv(const sparta::DenseConvCall* call) {
  if (!sparta::knows_dense_tile(*call)) return kUnknownTile;
  if (call->conv.images <= 0) return kDone;
  return sparta::multiply_dense_images(*call) ? kDone : kNoMemory;
}

SPARTA_EXPORT int sparta_depthwise(const sparta::DepthwiseCall* call) {
  if (call->planes <= 0) return kDone;
  return sparta::depthwise(*call) ? kDone : kNoMemory;
}

SPARTA_EXPORT int sparta_multiply_int8(const sparta::PanelMatrix* matrix, const sparta::Int8Call* call) {
  for (int vectors = 1; vectors <= matrix->mv; ++vectors) {
    if (!sparta::find_int8_kernel(matrix->bn, vectors)) return kUnknownTile;
  }
  if (matrix->mv < 1) return kUnknownTile;
  if (call->tokens <= 0 || matrix->channels <= 0) return kDone;
  return sparta::multiply_int8(*matrix, *call) ? kDone : kNoMemory;
}

SPARTA_EXPORT int sparta_multiply_int8_conv(const sparta::PanelMatrix* matrix, const sparta::Int8ConvCall* call) {
  for (int vectors = 1; vectors <= matrix->mv; ++vectors) {
    if (matrix->bn != sparta::kBlockRows && !sparta::find_int8_kernel(matrix->bn, vectors)) return kUnknownTile;
  }
  if (matrix->mv < 1) return kUnknownTile;
  if (call->conv.images <= 0 || matrix->channels <= 0) return kDone;
  return sparta::multiply_int8_conv(*matrix, *call) ? kDone : kNoMemory;
}

SPARTA_EXPORT int sparta_int8_depthwise(const sparta::Int8DepthwiseCall* call) {
  if (call->conv.conv.images <= 0) return kDone;
  return sparta::int8_depthwise(*call) ? kDone : kNoMemory;
}

SPARTA_EXPORT int sparta_multiply_bf16(const sparta::PanelMatrix* matrix, const sparta::PanelCall* call) {
  if (!sparta::knows_bf16(*matrix)) return kUnknownTile;
  if (call->tokens <= 0 || matrix->channels <= 0) return kDone;
  return sparta::multiply_bf16(*matrix, *call) ? kDone : kNoMemory;
}

SPARTA_EXPORT int sparta_multiply_bf16_conv(const sparta::PanelMatrix* matrix, const sparta::Bf16ConvCall* call) {
  if (!sparta::knows_bf16_rows(*matrix)) return kUnknownTile;
  if (call->conv.images <= 0 || matrix->channels <= 0) return kDone;
  return sparta::multiply_bf16_conv(*matrix, *call) ? kDone : kNoMemory;
}

SPARTA_EXPORT int sparta_bf16_depthwise(const sparta::Bf16DepthwiseCall* call) {
  if (call->conv.conv.images <= 0) return kDone;
  return sparta::bf16_depthwise(*call) ? kDone : kNoMemory;
}

// What this processor computes in bf16 by instructions of its own: 1 for products of pairs, 2 for tiles.
SPARTA_EXPORT int sparta_bf16_units() { return (sparta::has_bf16() ? 1 : 0) + (sparta::has_tiles() ? 2 : 0); }

// Whether this processor multiplies tiles of bytes.
SPARTA_EXPORT int sparta_byte_tiles() { return sparta::has_byte_tiles() ? 1 : 0; }

SPARTA_EXPORT int sparta_multiply_short(const sparta::ShortMatrix* matrix, const sparta::StreamCall* call) {
  if (!sparta::knows_short(*matrix)) return kUnknownTile;
  if (call->tokens <= 0 || matrix->channels <= 0) return kDone;
  return sparta::multiply_short(*matrix, *call) ? kDone : kNoMemory;
}

SPARTA_EXPORT int sparta_multiply_generated(const sparta::GeneratedGroup* groups, int64_t count, int64_t channels,
                                            int64_t inputs, const float* values, const sparta::PanelCall* call) {
  if (call->tokens <= 0 || channels <= 0) return kDone;
  return sparta::multiply_generated(groups, count, channels, inputs, values, *call) ? kDone : kNoMemory;
}

SPARTA_EXPORT int sparta_max_pool(const sparta::PoolCall* call) {
  if (call->planes <= 0 || call->out_rows <= 0 || call->out_columns <= 0) return kDone;
  return sparta::max_pool(*call) ? kDone : kNoMemory;
}

SPARTA_EXPORT int sparta_multiply_decoded(const sparta::DecodeMatrix* matrix, const float* x, int64_t x_stride,
                                          int64_t tokens, float* y, int64_t y_stride, int threads) {
  if (tokens <= 0 || matrix->channels <= 0) return kDone;
  return sparta::multiply_decoded(*matrix, x, x_stride, tokens, y, y_stride, threads) ? kDone : kNoMemory;
}

// Whether one token meets rows of int8 by instructions for 64 bytes.
SPARTA_EXPORT int sparta_byte_products() { return sparta::has_byte_products() ? 1 : 0; }

SPARTA_EXPORT int64_t sparta_decode_buffer(const sparta::DecodeProgram* program, int64_t rows) {
  return sparta::decode_buffer(*program, rows);
}

SPARTA_EXPORT int sparta_decode(const sparta::DecodeProgram* program, const sparta::DecodeCall* call) {
  if (call->batch <= 0 || call->tokens <= 0) return kDone;
  return sparta::decode_step(*program, *call) ? kDone : kNoMemory;
}

SPARTA_EXPORT int sparta_decode_greedy(const sparta::DecodeProgram* program, sparta::GreedyCall* call) {
  if (call->step.batch <= 0 || call->steps <= 0) return kDone;
  return sparta::decode_greedy(*program, *call) ? kDone : kNoMemory;
}

// Steps with everything filled in but the addresses of activations, one after the other; see chain.h.
SPARTA_EXPORT int sparta_run_chain(const sparta::ChainStep* steps, int64_t count, char* const* memories, int threads) {
  return sparta::run_chain(steps, count, memories, threads);
}

// The same steps for several parts of a batch side by side; see chain.h.
SPARTA_EXPORT int sparta_run_chains(const sparta::ChainStep* steps, int64_t count, char** memories, int64_t each,
                                    int64_t parts, char* const* arenas, int threads) {
  return sparta::run_chains(steps, count, memories, each, parts, arenas, threads);
}

// Token-major to panel and back: what neighbouring sparse layers do once, at both ends.
SPARTA_EXPORT void sparta_pack(const float* x, int64_t stride, int64_t tokens, int64_t channels, int64_t mv,
                               float* panel, int threads) {
  sparta::pack_panels(x, stride, tokens, channels, mv, panel, threads);
}

SPARTA_EXPORT void sparta_unpack(const float* panel, int64_t tokens, int64_t channels, int64_t mv, float* y,
                                 int64_t stride, int threads) {
  const int64_t tile = mv * sparta::kLanes;
  const int64_t tiles = sparta::ceil_div(tokens, tile);
  const sparta::Epilogue nothing{nullptr, nullptr, 0, sparta::kNone};
  sparta::parallel(threads, [&](int64_t index, int64_t count) {
    for (int64_t i = tiles * index / count; i < tiles * (index + 1) / count; ++i) {
      const int64_t present = std::min(tile, tokens - i * tile);
      sparta::unpack_rows<sparta::kNone>(panel + i * channels * tile, tile, 0, channels, present, nothing,
                                         y + i * tile * stride, stride);
    }
  });
}

// The same for bytes, four channels to a place. Of fp32, the call says how it is rounded on the way.
SPARTA_EXPORT void sparta_pack_int8(const sparta::Int8Call* call, int64_t places, int64_t mv, int32_t* panel) {
  sparta::pack_int8_panels(*call, places, mv, panel);
}

SPARTA_EXPORT void sparta_unpack_int8(const int32_t* panel, int64_t tokens, int64_t channels, int64_t mv,
                                      int is_unsigned, uint8_t* y) {
  const int64_t tile = mv * sparta::kLanes, places = sparta::ceil_div(channels, 4);
  for (int64_t first = 0; first < tokens; first += tile) {
    sparta::unpack_bytes_tile(panel + first * places, tile, channels, std::min(tile, tokens - first),
                              y + first * channels, channels);
  }
  if (sparta::has_vnni() == (is_unsigned != 0)) return;
  std::transform(y, y + tokens * channels, y, [](uint8_t byte) { return static_cast<uint8_t>(byte ^ 0x80); });
}
