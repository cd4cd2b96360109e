// The CPU kernels as operators of PyTorch's dispatcher, for programs that have no Python: one shared library that such a
// program loads before the packaged model. Packed operands come as tensors and numbers, so the package holds all of them.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include "api.cpp"

namespace {

// Where each number of the operator's list stands; the Python side writes them in this order.
enum Number { kForm, kChannels, kInputs, kGroups, kChunks, kBlock, kVectors, kInterleave, kPrefetch, kIndexBytes,
              kActivation, kNumbers };
constexpr int64_t kPanelForm = -1;

template <class T>
const T* data(at::TensorList arrays, size_t place) {
  return arrays[place].numel() ? static_cast<const T*>(arrays[place].const_data_ptr()) : nullptr;
}

sparta::PanelMatrix panel_matrix(const at::Tensor& values, at::TensorList arrays, at::IntArrayRef n) {
  TORCH_CHECK(arrays.size() == 5, "sparta_aot::linear: a panel has 5 arrays, not ", arrays.size());
  sparta::PanelMatrix matrix{};
  matrix.channels = n[kChannels];
  matrix.inputs = n[kInputs];
  matrix.groups = n[kGroups];
  matrix.chunks = n[kChunks];
  matrix.starts = data<int64_t>(arrays, 0);
  matrix.offsets = data<uint32_t>(arrays, 1);
  matrix.values = values.const_data_ptr<float>();
  matrix.rows = data<int32_t>(arrays, 2);
  matrix.costs = data<int64_t>(arrays, 3);
  matrix.chunk_columns = data<int64_t>(arrays, 4);
  matrix.bn = static_cast<int32_t>(n[kBlock]);
  matrix.mv = static_cast<int32_t>(n[kVectors]);
  matrix.interleave = static_cast<int32_t>(n[kInterleave]);
  matrix.prefetch = static_cast<int32_t>(n[kPrefetch]);
  return matrix;
}

sparta::StreamMatrix stream_matrix(const at::Tensor& values, at::TensorList arrays, at::IntArrayRef n) {
  TORCH_CHECK(arrays.size() == 6, "sparta_aot::linear: a stream has 6 arrays, not ", arrays.size());
  sparta::StreamMatrix matrix{};
  matrix.channels = n[kChannels];
  matrix.inputs = n[kInputs];
  matrix.groups = n[kGroups];
  matrix.starts = data<int64_t>(arrays, 0);
  matrix.indices = data<void>(arrays, 1);
  matrix.values = values.const_data_ptr<float>();
  matrix.step_starts = data<int64_t>(arrays, 2);
  matrix.step_lanes = data<uint16_t>(arrays, 3);
  matrix.step_advances = data<uint8_t>(arrays, 4);
  matrix.costs = data<int64_t>(arrays, 5);
  matrix.form = static_cast<int32_t>(n[kForm]);
  matrix.height = static_cast<int32_t>(n[kBlock]);
  matrix.index_bytes = static_cast<int32_t>(n[kIndexBytes]);
  matrix.prefetch = static_cast<int32_t>(n[kPrefetch]);
  return matrix;
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& values, at::TensorList arrays, at::IntArrayRef numbers,
                  const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& residual) {
  TORCH_CHECK(numbers.size() == kNumbers, "sparta_aot::linear: ", int(kNumbers), " numbers, not ", numbers.size());
  TORCH_CHECK(x.dim() == 2 && x.size(1) == numbers[kInputs], "sparta_aot::linear: x must be (M, ", numbers[kInputs], ")");
  TORCH_CHECK(x.scalar_type() == at::kFloat, "sparta_aot::linear: x must be float32");
  const at::Tensor rows = x.contiguous();
  const int64_t tokens = rows.size(0), channels = numbers[kChannels];
  at::Tensor y = at::empty({tokens, channels}, rows.options());
  at::Tensor added, shift;
  if (residual) {
    TORCH_CHECK(residual->sizes() == y.sizes(), "sparta_aot::linear: the residual must be (M, ", channels, ")");
    added = residual->contiguous();
  }
  if (bias) shift = bias->contiguous();
  const float* shift_data = bias ? shift.const_data_ptr<float>() : nullptr;
  const float* added_data = residual ? added.const_data_ptr<float>() : nullptr;
  const auto activation = static_cast<int32_t>(numbers[kActivation]);
  const auto threads = static_cast<int32_t>(at::get_num_threads());
  int failed = 0;
  if (numbers[kForm] == kPanelForm) {
    const sparta::PanelMatrix matrix = panel_matrix(values, arrays, numbers);
    const sparta::PanelCall call{rows.const_data_ptr<float>(), y.mutable_data_ptr<float>(), tokens, numbers[kInputs],
                                 channels, shift_data, added_data, channels, activation, threads, 0, 0};
    failed = sparta_multiply_panels(&matrix, &call);
  } else {
    const sparta::StreamMatrix matrix = stream_matrix(values, arrays, numbers);
    const sparta::StreamCall call{rows.const_data_ptr<float>(), y.mutable_data_ptr<float>(), tokens, numbers[kInputs],
                                  channels, shift_data, added_data, channels, activation, threads};
    failed = sparta_multiply_stream(&matrix, &call);
  }
  TORCH_CHECK(!failed, "sparta_aot::linear: the library was built for another processor than the model was packed for");
  return y;
}

}  // namespace

TORCH_LIBRARY(sparta_aot, library) {
  library.def(
      "linear(Tensor x, Tensor values, Tensor[] arrays, int[] numbers, Tensor? bias, Tensor? residual) -> Tensor");
}

TORCH_LIBRARY_IMPL(sparta_aot, CPU, library) { library.impl("linear", &linear); }
