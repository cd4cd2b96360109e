// A chain: the steps of a model, or of a part of it, one after the other in one call. A step is one of the library's
// calls with everything filled in but where its activations are, which is known only when the chain runs: a place is an
// offset into one of the memories that a call of the chain brings.
#pragma once

#include "attention.h"
#include "attention_bf16.h"
#include "bf16.h"
#include "bf16_conv.h"
#include "bf16_depthwise.h"
#include "conv.h"
#include "dense_conv.h"
#include "depthwise.h"
#include "expanded.h"
#include "gemv.h"
#include "int8.h"
#include "int8_conv.h"
#include "int8_depthwise.h"
#include "int8_pool.h"
#include "pool.h"
#include "rows.h"
#include "short_stream.h"
#include "spmm.h"
#include "winograd.h"

namespace sparta {

enum StepKind : int32_t {
  kStepPanels = 0,
  kStepStream = 1,
  kStepShort = 2,
  kStepInt8 = 3,
  kStepConv = 4,
  kStepInt8Conv = 5,
  kStepPool = 6,
  kStepNorm = 7,
  kStepMap = 8,
  kStepCopy = 9,
  kStepGather = 10,
  kStepAttention = 11,
  kStepPack = 12,
  kStepPackInt8 = 13,
  kStepBf16 = 14,
  kStepPackBf16 = 15,
  kStepAttentionBf16 = 16,
  kStepDenseConv = 20,
  kStepDepthwise = 21,
  kStepMean = 22,
  kStepInt8Pool = 24,
  kStepInt8Depthwise = 25,
  kStepBf16Conv = 26,
  kStepBf16Pool = 27,
  kStepBf16Depthwise = 28,
};

enum ChainResult : int { kChainDone = 0, kChainNoMemory = 2, kChainNoRow = 3 };

struct ChainStep {
  int32_t kind;
  int32_t passing;     // whether only the next step reads what this one writes
  const void* matrix;  // of a product, or null
  const void* call;    // of the kind's type; what the places below say is not in it
  int64_t places[5];   // of x, y and up to three more: memory * 2^48 + bytes, or -1
};

constexpr int64_t kPlaceBits = 48;

// A packing of token-major rows into panels.
struct PackCall {
  const float* x;
  float* y;
  int64_t tokens;
  int64_t channels;
  int64_t stride;
  int64_t mv;
};

// Of bytes: how the rows are rounded is that of an int8 call.
struct PackInt8Call {
  Int8Call rows;
  int64_t places;
  int64_t mv;
};

class ChainRun {
 public:
  ChainRun(char* const* memories, int32_t threads) : memories_(memories), threads_(threads) {}

  int run(const ChainStep& step) const {
    switch (step.kind) {
      case kStepPanels: return code(multiply_panels(*matrix<PanelMatrix>(step), product<PanelCall>(step)));
      case kStepStream: return code(multiply_stream(*matrix<StreamMatrix>(step), product<StreamCall>(step)));
      case kStepShort: return code(multiply_short(*matrix<ShortMatrix>(step), product<StreamCall>(step)));
      case kStepInt8: return code(multiply_int8(*matrix<PanelMatrix>(step), product<Int8Call>(step)));
      case kStepBf16: return code(multiply_bf16(*matrix<PanelMatrix>(step), product<PanelCall>(step)));
      case kStepConv: return code(multiply_conv(*matrix<PanelMatrix>(step), product<ConvCall>(step)));
      case kStepDenseConv: return dense_conv(step);
      case kStepDepthwise: return depthwise_planes(step);
      case kStepMean: return mean_planes(simple<MeanCall>(step)), kChainDone;
      case kStepPool: return code(max_pool(simple<PoolCall>(step)));
      case kStepInt8Pool: return code(max_pool_places(simple<PoolCall>(step)));
      case kStepNorm: return norm_rows(simple<NormCall>(step)), kChainDone;
      case kStepCopy: return copy_strided(simple<CopyCall>(step)), kChainDone;
      case kStepMap: return map(step);
      case kStepGather: return gather(step);
      case kStepAttention: return code(attend_all(attention(step)));
      case kStepAttentionBf16: return code(attend_in_bf16(attention(step)));
      case kStepInt8Conv: return int8_conv(step);
      case kStepInt8Depthwise: return int8_depthwise_planes(step);
      case kStepBf16Conv: return bf16_conv(step);
      case kStepBf16Depthwise: return bf16_depthwise_planes(step);
      case kStepBf16Pool: return code(max_pool_bf16(simple<PoolCall>(step)));
      case kStepPack: return pack(step);
      case kStepPackInt8: return pack_int8(step);
      case kStepPackBf16: return pack_bf16(step);
      default: return kChainNoMemory;
    }
  }

  // Whether two convolutions can run band by band, one after the other.
  bool pairs(const ChainStep& first, const ChainStep& second) const {
    return first.kind == kStepConv && second.kind == kStepConv && second.places[0] == first.places[1] &&
           is_pair(*matrix<PanelMatrix>(first), product<ConvCall>(first), *matrix<PanelMatrix>(second),
                   product<ConvCall>(second));
  }

  // Whether a depthwise layer is all that reads a convolution, and both can run band by band.
  bool expands(const ChainStep& first, const ChainStep& second) const {
    return first.kind == kStepConv && second.kind == kStepDepthwise && first.passing &&
           second.places[0] == first.places[1] && second.places[4] < 0 &&
           is_expanded(*matrix<PanelMatrix>(first), product<ConvCall>(first), product<DepthwiseCall>(second));
  }

  int run_expanded(const ChainStep& first, const ChainStep& second) const {
    return code(multiply_expanded(*matrix<PanelMatrix>(first), product<ConvCall>(first),
                                  product<DepthwiseCall>(second)));
  }

  int run_pair(const ChainStep& first, const ChainStep& second) const {
    return code(multiply_pair(*matrix<PanelMatrix>(first), product<ConvCall>(first), *matrix<PanelMatrix>(second),
                              product<ConvCall>(second)));
  }

 private:
  static int code(bool done) { return done ? kChainDone : kChainNoMemory; }

  template <class T>
  T* at(int64_t place) const {
    if (place < 0) return nullptr;
    return reinterpret_cast<T*>(memories_[place >> kPlaceBits] + (place & ((int64_t{1} << kPlaceBits) - 1)));
  }

  template <class Matrix>
  static const Matrix* matrix(const ChainStep& step) {
    return static_cast<const Matrix*>(step.matrix);
  }

  // A call with x, y and threads.
  template <class Call>
  Call simple(const ChainStep& step) const {
    Call call = *static_cast<const Call*>(step.call);
    call.x = at<std::remove_pointer_t<decltype(call.x)>>(step.places[0]);
    call.y = at<std::remove_pointer_t<decltype(call.y)>>(step.places[1]);
    call.threads = threads_;
    return call;
  }

  // The same with a residual.
  template <class Call>
  Call product(const ChainStep& step) const {
    Call call = simple<Call>(step);
    call.residual = at<float>(step.places[2]);
    return call;
  }

  int map(const ChainStep& step) const {
    MapCall call = simple<MapCall>(step);
    if (step.places[2] >= 0) call.other = at<float>(step.places[2]);
    map_rows(call);
    return kChainDone;
  }

  int gather(const ChainStep& step) const {
    GatherCall call = *static_cast<const GatherCall*>(step.call);
    call.ids = at<int64_t>(step.places[0]);
    call.y = at<float>(step.places[1]);
    call.threads = threads_;
    return gather_rows(call) ? kChainDone : kChainNoRow;
  }

  AttentionCall attention(const ChainStep& step) const {
    AttentionCall call = *static_cast<const AttentionCall*>(step.call);
    call.q = at<float>(step.places[0]);
    call.y = at<float>(step.places[1]);
    call.k = at<float>(step.places[2]);
    call.v = at<float>(step.places[3]);
    call.mask = at<char>(step.places[4]);
    call.threads = threads_;
    return call;
  }

  int dense_conv(const ChainStep& step) const {
    DenseConvCall call = *static_cast<const DenseConvCall*>(step.call);
    call.conv.x = at<float>(step.places[0]);
    call.conv.y = at<float>(step.places[1]);
    call.conv.residual = at<float>(step.places[2]);
    call.conv.threads = threads_;
    return code(multiply_dense_images(call));
  }

  int depthwise_planes(const ChainStep& step) const {
    DepthwiseCall call = product<DepthwiseCall>(step);
    call.real = at<float>(step.places[4]);
    return code(depthwise(call));
  }

  // A convolution of int8 or bf16 with its images, which may come in short numbers, and what becomes of them.
  template <class Call>
  Call with_images(Call call, bool come_short, const ChainStep& step) const {
    call.image = at<std::remove_pointer_t<decltype(call.image)>>(step.places[0]);
    call.conv.y = at<float>(step.places[1]);
    call.conv.residual = at<float>(step.places[2]);
    call.conv.x = at<float>(step.places[come_short ? 0 : 3]);  // the image in short numbers, or room for it
    call.real = at<float>(step.places[4]);
    call.conv.threads = threads_;
    return call;
  }

  int bf16_conv(const ChainStep& step) const {
    const Bf16ConvCall& given = *static_cast<const Bf16ConvCall*>(step.call);
    return code(multiply_bf16_conv(*matrix<PanelMatrix>(step), with_images(given, given.x_is_short, step)));
  }

  int bf16_depthwise_planes(const ChainStep& step) const {
    Bf16DepthwiseCall call = *static_cast<const Bf16DepthwiseCall*>(step.call);
    call.conv = with_images(call.conv, call.conv.x_is_short, step);
    return code(bf16_depthwise(call));
  }

  int int8_conv(const ChainStep& step) const {
    const Int8ConvCall& given = *static_cast<const Int8ConvCall*>(step.call);
    return code(multiply_int8_conv(*matrix<PanelMatrix>(step), with_images(given, given.x_is_places, step)));
  }

  int int8_depthwise_planes(const ChainStep& step) const {
    Int8DepthwiseCall call = *static_cast<const Int8DepthwiseCall*>(step.call);
    call.conv = with_images(call.conv, call.conv.x_is_places, step);
    return code(int8_depthwise(call));
  }

  int pack(const ChainStep& step) const {
    const PackCall& call = *static_cast<const PackCall*>(step.call);
    pack_panels(at<float>(step.places[0]), call.stride, call.tokens, call.channels, call.mv, at<float>(step.places[1]),
                threads_);
    return kChainDone;
  }

  int pack_bf16(const ChainStep& step) const {
    const PackCall& call = *static_cast<const PackCall*>(step.call);
    pack_bf16_panels(at<float>(step.places[0]), call.stride, call.tokens, call.channels, at<int32_t>(step.places[1]),
                     threads_);
    return kChainDone;
  }

  int pack_int8(const ChainStep& step) const {
    const PackInt8Call& given = *static_cast<const PackInt8Call*>(step.call);
    Int8Call rows = given.rows;
    rows.x = at<void>(step.places[0]);
    rows.threads = threads_;
    pack_int8_panels(rows, given.places, given.mv, at<int32_t>(step.places[1]));
    return kChainDone;
  }

  char* const* memories_;
  int32_t threads_;
};

// Runs the steps up to the first that fails.
inline int run_steps(const ChainRun& run, const ChainStep* steps, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const bool paired = i + 1 < count && run.pairs(steps[i], steps[i + 1]);
    const bool expanded = i + 1 < count && run.expands(steps[i], steps[i + 1]);
    const int result = paired     ? run.run_pair(steps[i], steps[i + 1])
                       : expanded ? run.run_expanded(steps[i], steps[i + 1])
                                  : run.run(steps[i]);
    if (result) return result;
    i += paired || expanded;
  }
  return kChainDone;
}

inline int run_chain(const ChainStep* steps, int64_t count, char* const* memories, int32_t threads) {
  const ChainRun run(memories, threads);
  int result = kChainDone;
  const auto all = [&] { result = run_steps(run, steps, count); };
  if (count > 1) {
    in_team(threads, all);
  } else {
    all();
  }
  return result;
}

// Runs the same steps for several parts of a batch, each part on one thread, so that no thread waits for another between
// layers. Every part has `each` memories, of which the first is set to the arena of the thread that takes it.
inline int run_chains(const ChainStep* steps, int64_t count, char** memories, int64_t each, int64_t parts,
                      char* const* arenas, int32_t threads) {
  std::atomic<int64_t> next{0};
  std::atomic<int> result{kChainDone};
  parallel(threads, [&](int64_t index, int64_t) {
    for (int64_t part = next.fetch_add(1); part < parts; part = next.fetch_add(1)) {
      memories[part * each] = arenas[index];
      const int found = run_steps(ChainRun(memories + part * each, 1), steps, count);
      if (found) result.store(found);
    }
  });
  return result.load();
}

}  // namespace sparta
