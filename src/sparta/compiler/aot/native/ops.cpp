// The CPU kernels as operators of PyTorch's dispatcher, for programs that have no Python: one shared library that such a
// program loads before the packaged model. Packed operands come as tensors and numbers, so the package holds all of them.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include "api.cpp"

namespace {

// Where each number of an operator's list stands; the Python side (layers.py) writes them in this order.
enum Number { kForm, kChannels, kInputs, kGroups, kChunks, kBlock, kVectors, kInterleave, kPrefetch, kIndexBytes,
              kActivation, kNumbers };
constexpr int64_t kPanelForm = -1;
enum ConvNumber { cChannels, cInputs, cGroups, cBlock, cVectors, cInterleave, cPrefetch, cInChannels, cInRows, cInColumns,
                  cOutRows, cOutColumns, cStrideRows, cStrideColumns, cSlots, cRowWidth, cBandTokens, cReach, cPlane,
                  cDirect, cChunks, cActivation, cNumbers };
enum Int8Number { iChannels, iInputs, iUnits, iGroups, iBlock, iVectors, iRelu, iInputZero, iOutput, iOutputZero, iNumbers };

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

at::Tensor conv2d(const at::Tensor& x, const at::Tensor& values, at::TensorList arrays, at::IntArrayRef n,
                  const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& residual) {
  TORCH_CHECK(n.size() == cNumbers, "sparta_aot::conv2d: ", int(cNumbers), " numbers, not ", n.size());
  TORCH_CHECK(arrays.size() == 7, "sparta_aot::conv2d: 7 arrays, not ", arrays.size());
  TORCH_CHECK(x.dim() == 4 && x.size(1) == n[cInChannels] && x.size(2) == n[cInRows] && x.size(3) == n[cInColumns],
              "sparta_aot::conv2d: x must be (B, ", n[cInChannels], ", ", n[cInRows], ", ", n[cInColumns], ")");
  TORCH_CHECK(x.scalar_type() == at::kFloat, "sparta_aot::conv2d: x must be float32");
  const at::Tensor images = x.contiguous();
  at::Tensor y = at::empty({images.size(0), n[cChannels], n[cOutRows], n[cOutColumns]}, images.options());
  at::Tensor added, shift;
  if (residual) {
    TORCH_CHECK(residual->sizes() == y.sizes(), "sparta_aot::conv2d: the residual must be ", y.sizes());
    added = residual->contiguous();
  }
  if (bias) shift = bias->contiguous();
  sparta::PanelMatrix matrix{};
  matrix.channels = n[cChannels];
  matrix.inputs = n[cInputs];
  matrix.groups = n[cGroups];
  matrix.chunks = n[cChunks];
  matrix.starts = data<int64_t>(arrays, 0);
  matrix.offsets = data<uint32_t>(arrays, 1);
  matrix.values = values.const_data_ptr<float>();
  matrix.rows = data<int32_t>(arrays, 2);
  matrix.costs = data<int64_t>(arrays, 3);
  matrix.bn = static_cast<int32_t>(n[cBlock]);
  matrix.mv = static_cast<int32_t>(n[cVectors]);
  matrix.interleave = static_cast<int32_t>(n[cInterleave]);
  matrix.prefetch = static_cast<int32_t>(n[cPrefetch]);
  sparta::ConvCall call{};
  call.x = images.const_data_ptr<float>();
  call.y = y.mutable_data_ptr<float>();
  call.bias = bias ? shift.const_data_ptr<float>() : nullptr;
  call.residual = residual ? added.const_data_ptr<float>() : nullptr;
  call.slot_rows = data<int32_t>(arrays, 4);
  call.slot_columns = data<int32_t>(arrays, 5);
  call.used = data<uint8_t>(arrays, 6);
  call.images = images.size(0);
  for (int64_t dim = 0; dim < 4; ++dim) call.x_strides[dim] = images.stride(dim);
  call.in_channels = n[cInChannels];
  call.in_rows = n[cInRows];
  call.in_columns = n[cInColumns];
  call.out_rows = n[cOutRows];
  call.out_columns = n[cOutColumns];
  call.stride_rows = n[cStrideRows];
  call.stride_columns = n[cStrideColumns];
  call.slots = n[cSlots];
  call.row_width = n[cRowWidth];
  call.band_tokens = n[cBandTokens];
  call.reach = n[cReach];
  call.plane = n[cPlane];
  call.direct = static_cast<int32_t>(n[cDirect]);
  call.activation = static_cast<int32_t>(n[cActivation]);
  call.threads = static_cast<int32_t>(at::get_num_threads());
  TORCH_CHECK(!sparta_multiply_conv(&matrix, &call),
              "sparta_aot::conv2d: the library was built for another processor than the model was packed for");
  return y;
}

// Integers (M, K) times a weight; `operands` are its packed values, the sums of its rows, and a factor a channel.
at::Tensor int8_linear(const at::Tensor& x, at::TensorList operands, at::TensorList arrays, at::IntArrayRef n,
                       const std::optional<at::Tensor>& offset) {
  TORCH_CHECK(n.size() == iNumbers, "sparta_aot::int8_linear: ", int(iNumbers), " numbers, not ", n.size());
  TORCH_CHECK(operands.size() == 3 && arrays.size() == 4, "sparta_aot::int8_linear: 3 operands and 4 arrays");
  TORCH_CHECK(x.dim() == 2 && x.size(1) == n[iInputs], "sparta_aot::int8_linear: x must be (M, ", n[iInputs], ")");
  const bool is_unsigned = x.scalar_type() == at::kByte;
  TORCH_CHECK(is_unsigned || x.scalar_type() == at::kChar, "sparta_aot::int8_linear: x must be int8 or uint8");
  const int64_t missing = n[iUnits] * 4 - n[iInputs];
  const at::Tensor rows = missing ? at::constant_pad_nd(x, {0, missing}).contiguous() : x.contiguous();
  const at::ScalarType types[] = {at::kFloat, at::kChar, at::kByte};
  at::Tensor y = at::empty({x.size(0), n[iChannels]}, x.options().dtype(types[n[iOutput]]));
  const at::Tensor factor = operands[2].contiguous();
  at::Tensor shift;
  if (offset) shift = offset->contiguous();
  sparta::PanelMatrix matrix{};
  matrix.channels = n[iChannels];
  matrix.inputs = n[iUnits];
  matrix.groups = n[iGroups];
  matrix.chunks = 1;
  matrix.starts = data<int64_t>(arrays, 0);
  matrix.offsets = data<uint32_t>(arrays, 1);
  matrix.values = static_cast<const float*>(operands[0].const_data_ptr());  // bits of integers
  matrix.rows = data<int32_t>(arrays, 2);
  matrix.costs = data<int64_t>(arrays, 3);
  matrix.bn = static_cast<int32_t>(n[iBlock]);
  matrix.mv = static_cast<int32_t>(n[iVectors]);
  matrix.interleave = 1;
  sparta::Int8Call call{};
  call.x = static_cast<decltype(call.x)>(rows.const_data_ptr());
  call.y = y.mutable_data_ptr();
  call.tokens = x.size(0);
  call.x_stride = n[iUnits];
  call.y_stride = n[iChannels];
  call.multiplier = factor.const_data_ptr<float>();
  call.offset = offset ? shift.const_data_ptr<float>() : nullptr;
  call.row_sums = operands[1].const_data_ptr<int32_t>();
  call.floor = n[iRelu] ? 0.0f : -std::numeric_limits<float>::infinity();
  call.x_is_unsigned = is_unsigned;
  call.x_zero = static_cast<int32_t>(n[iInputZero]);
  call.output = static_cast<int32_t>(n[iOutput]);
  call.y_zero = static_cast<int32_t>(n[iOutputZero]);
  call.threads = static_cast<int32_t>(at::get_num_threads());
  TORCH_CHECK(!sparta_multiply_int8(&matrix, &call),
              "sparta_aot::int8_linear: the library was built for another processor than the model was packed for");
  return y;
}

}  // namespace

TORCH_LIBRARY(sparta_aot, library) {
  library.def(
      "linear(Tensor x, Tensor values, Tensor[] arrays, int[] numbers, Tensor? bias, Tensor? residual) -> Tensor");
  library.def(
      "conv2d(Tensor x, Tensor values, Tensor[] arrays, int[] numbers, Tensor? bias, Tensor? residual) -> Tensor");
  library.def("int8_linear(Tensor x, Tensor[] operands, Tensor[] arrays, int[] numbers, Tensor? offset) -> Tensor");
}

TORCH_LIBRARY_IMPL(sparta_aot, CPU, library) {
  library.impl("linear", &linear);
  library.impl("conv2d", &conv2d);
  library.impl("int8_linear", &int8_linear);
}
