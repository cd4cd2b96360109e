// The CPU kernels as operators of PyTorch's dispatcher, for programs that have no Python: one shared library that such a
// program loads before the packaged model. Packed operands come as tensors and numbers, so the package holds all of them,
// and none is believed before checks.h has looked at it.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <array>

#include "api.cpp"
#include "checks.h"

namespace {

// Where each number of an operator's list stands; the Python side (layers.py) writes them in this order.
enum Number { kForm, kChannels, kInputs, kGroups, kChunks, kBlock, kVectors, kInterleave, kPrefetch, kIndexBytes,
              kActivation, kNumbers };
constexpr int64_t kPanelForm = -1;
constexpr int64_t kMostPadding = 1024;  // pixels that a result may have more than its image
enum ConvNumber { cChannels, cInputs, cGroups, cBlock, cVectors, cInterleave, cPrefetch, cInChannels, cInRows, cInColumns,
                  cOutRows, cOutColumns, cStrideRows, cStrideColumns, cSlots, cRowWidth, cBandTokens, cReach, cPlane,
                  cDirect, cChunks, cActivation, cNumbers };
enum Int8Number {
  iChannels, iInputs, iUnits, iGroups, iBlock, iVectors, iRelu, iInputZero, iOutput, iOutputZero, iNoLeastWeight, iNumbers
};

using sparta_aot::Array;
using sparta_aot::Panel;
using sparta_aot::check_number;

sparta_aot::Checked& checked() {
  static sparta_aot::Checked* const kept = new sparta_aot::Checked;  // outlives every tensor
  return *kept;
}

std::vector<at::Tensor> together(at::TensorList arrays, std::initializer_list<at::Tensor> others) {
  std::vector<at::Tensor> all(others);
  all.insert(all.end(), arrays.begin(), arrays.end());
  return all;
}

template <class T>
const T* data(at::TensorList arrays, size_t place) {
  return arrays[place].numel() ? static_cast<const T*>(arrays[place].const_data_ptr()) : nullptr;
}

sparta::PanelMatrix panel_matrix(const at::Tensor& values, at::TensorList arrays, at::IntArrayRef n) {
  TORCH_CHECK(arrays.size() == 5, "sparta_aot::linear: a panel has 5 arrays, not ", arrays.size());
  checked().once(together(arrays, {values}), n, [&] {
    const Panel panel{n[kChannels], n[kGroups], n[kChunks], n[kBlock], n[kVectors], n[kPrefetch], n[kInterleave]};
    const sparta_aot::Entries entries = panel.check(arrays);
    sparta_aot::check_floats(values, entries.values, "values");
    const Array<int64_t> columns(arrays, 4, n[kChunks] + 1, "chunk_columns");
    sparta_aot::check_running(columns, n[kChunks] + 1, n[kInputs], "chunk_columns");
    sparta_aot::check_columns(panel, arrays, {columns.data, columns.data + n[kChunks] + 1}, entries.offsets);
  });
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
  sparta_aot::check_floats(values, 0, "values");
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
  checked().once(together(arrays, {values}), n, [&] {
    for (const Number number : {kForm, kBlock, kIndexBytes, kPrefetch}) {
      check_number(n[number], 0, sparta_aot::kMost - 1, "a number");
    }
    sparta_aot::check_stream(matrix, arrays, values.numel());
  });
  return matrix;
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& values, at::TensorList arrays, at::IntArrayRef numbers,
                  const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& residual) {
  TORCH_CHECK(numbers.size() == kNumbers, "sparta_aot::linear: ", int(kNumbers), " numbers, not ", numbers.size());
  TORCH_CHECK(x.dim() == 2 && x.size(1) == numbers[kInputs], "sparta_aot::linear: x must be (M, ", numbers[kInputs], ")");
  TORCH_CHECK(x.scalar_type() == at::kFloat, "sparta_aot::linear: x must be float32");
  check_number(numbers[kInputs], 0, sparta_aot::kMost, "inputs");
  check_number(numbers[kChannels], 0, sparta_aot::kMost, "channels");
  check_number(numbers[kActivation], sparta::kNone, sparta::kReluLast, "the activation");
  const bool is_panel = numbers[kForm] == kPanelForm;
  const sparta::PanelMatrix panel = is_panel ? panel_matrix(values, arrays, numbers) : sparta::PanelMatrix{};
  const sparta::StreamMatrix stream = is_panel ? sparta::StreamMatrix{} : stream_matrix(values, arrays, numbers);
  const at::Tensor rows = x.contiguous();
  const int64_t tokens = rows.size(0), channels = numbers[kChannels];
  at::Tensor y = at::empty({tokens, channels}, rows.options());
  at::Tensor added, shift;
  sparta_aot::check_bias(bias, channels, "the bias");
  sparta_aot::check_residual(residual, y.sizes());
  if (residual) added = residual->contiguous();
  if (bias) shift = bias->contiguous();
  const float* shift_data = bias ? shift.const_data_ptr<float>() : nullptr;
  const float* added_data = residual ? added.const_data_ptr<float>() : nullptr;
  const auto activation = static_cast<int32_t>(numbers[kActivation]);
  const auto threads = static_cast<int32_t>(at::get_num_threads());
  const sparta::StreamCall call{rows.const_data_ptr<float>(), y.mutable_data_ptr<float>(), tokens, numbers[kInputs],
                                channels, shift_data, added_data, channels, activation, threads};
  const sparta::PanelCall token_major{call, 0, 0};
  const int failed =
      is_panel ? sparta_multiply_panels(&panel, &token_major) : sparta_multiply_stream(&stream, &call);
  TORCH_CHECK(!failed, "sparta_aot::linear: the library was built for another processor than the model was packed for");
  return y;
}

// Looks at the packed operands of a convolution and at the plan of its image.
void check_conv(const at::Tensor& values, at::TensorList arrays, at::IntArrayRef n) {
  for (int number = 0; number < cNumbers; ++number) check_number(n[number], 0, sparta_aot::kMost - 1, "a number");
  for (const ConvNumber number : {cOutRows, cOutColumns, cStrideRows, cStrideColumns, cBandTokens, cSlots}) {
    check_number(n[number], 1, sparta_aot::kMost - 1, "a number");
  }
  check_number(n[cOutRows], 1, n[cInRows] + kMostPadding, "the rows of the result");
  check_number(n[cOutColumns], 1, n[cInColumns] + kMostPadding, "the columns of the result");
  check_number(n[cRowWidth], n[cOutColumns], sparta_aot::kMost - 1, "the width of a row");
  const Panel panel{n[cChannels], n[cGroups], n[cChunks], n[cBlock], n[cVectors], n[cPrefetch], n[cInterleave]};
  const auto [entries, stored] = panel.check(arrays);
  sparta_aot::check_floats(values, stored, "values");
  Array<int32_t>(arrays, 4, n[cSlots], "slot_rows");
  Array<int32_t>(arrays, 5, n[cSlots], "slot_columns");
  Array<uint8_t>(arrays, 6, sparta_aot::product({n[cSlots], n[cInChannels]}, "used"), "used");
  const int64_t tokens = (n[cOutRows] - 1) * n[cRowWidth] + n[cOutColumns];
  int64_t room = sparta_aot::product({n[cInChannels], n[cInRows], n[cInColumns]}, "the image"), read = tokens;
  if (n[cDirect]) {
    TORCH_CHECK(n[cSlots] == 1 && n[cRowWidth] == n[cOutColumns] && std::min(tokens, n[cBandTokens]) >= sparta::kLanes,
                "sparta_aot::conv2d: an image that cannot be read in place");
  } else {
    // Bands have whole vectors of this processor, which may be wider than that of the processor they were cut for.
    read = sparta::ceil_div(n[cBandTokens], sparta::kLanes) * sparta::kLanes;
    TORCH_CHECK(n[cPlane] >= read + n[cReach], "sparta_aot::conv2d: planes of ", n[cPlane], " floats");
    room = sparta_aot::product({n[cSlots], n[cInChannels], n[cPlane]}, "the planes") + panel.tile();
  }
  const Array<uint32_t> offsets(arrays, 1, entries, "offsets");
  for (int64_t i = 0; i < entries; ++i) {
    TORCH_CHECK(offsets[i] % sizeof(float) == 0 && offsets[i] / int64_t{sizeof(float)} + read <= room,
                "sparta_aot::conv2d: offsets[", i, "] is ", offsets[i]);
  }
}

at::Tensor conv2d(const at::Tensor& x, const at::Tensor& values, at::TensorList arrays, at::IntArrayRef n,
                  const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& residual) {
  TORCH_CHECK(n.size() == cNumbers, "sparta_aot::conv2d: ", int(cNumbers), " numbers, not ", n.size());
  TORCH_CHECK(arrays.size() == 7, "sparta_aot::conv2d: 7 arrays, not ", arrays.size());
  TORCH_CHECK(x.dim() == 4 && x.size(1) == n[cInChannels] && x.size(2) == n[cInRows] && x.size(3) == n[cInColumns],
              "sparta_aot::conv2d: x must be (B, ", n[cInChannels], ", ", n[cInRows], ", ", n[cInColumns], ")");
  TORCH_CHECK(x.scalar_type() == at::kFloat, "sparta_aot::conv2d: x must be float32");
  check_number(n[cActivation], sparta::kNone, sparta::kReluLast, "the activation");
  checked().once(together(arrays, {values}), n, [&] { check_conv(values, arrays, n); });
  const at::Tensor images = x.contiguous();
  at::Tensor y = at::empty({images.size(0), n[cChannels], n[cOutRows], n[cOutColumns]}, images.options());
  at::Tensor added, shift;
  sparta_aot::check_bias(bias, n[cChannels], "the bias");
  sparta_aot::check_residual(residual, y.sizes());
  if (residual) added = residual->contiguous();
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
  const int64_t plane = n[cInRows] * n[cInColumns];  // a contiguous tensor may have any stride along a dim of 1
  std::copy_n(std::array{n[cInChannels] * plane, plane, n[cInColumns], int64_t{1}}.data(), 4, call.x_strides);
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

// Looks at the packed operands of an int8 layer.
void check_int8(at::TensorList operands, at::TensorList arrays, at::IntArrayRef n) {
  const Panel panel{n[iChannels], n[iGroups], 1, n[iBlock], n[iVectors], 0};
  const int64_t entries = panel.check(arrays).offsets;
  sparta_aot::check_columns(panel, arrays, {0, n[iUnits]}, entries);
  for (const at::Tensor& operand : operands) {
    TORCH_CHECK(operand.is_cpu() && operand.is_contiguous(), "sparta_aot::int8_linear: operands are contiguous, on the CPU");
  }
  TORCH_CHECK(int64_t(operands[0].nbytes()) >= sparta_aot::product({entries, n[iBlock], 4}, "values"),
              "sparta_aot::int8_linear: ", operands[0].nbytes(), " bytes of values for ", entries, " entries");
  TORCH_CHECK(operands[1].scalar_type() == at::kInt && operands[1].numel() == n[iChannels],
              "sparta_aot::int8_linear: the sums of rows must be int32 (", n[iChannels], ")");
  sparta_aot::check_bias(operands[2], n[iChannels], "the multiplier");
  if (n[iBlock] == 16 && !sparta::has_byte_tiles()) {
    TORCH_WARN_ONCE("sparta_aot::int8_linear: the package was made for a processor with AMX, which this one has not: its "
                    "int8 layers run slowly here; package the model on this machine");
  }
  if (!n[iNoLeastWeight]) return;  // kernels that are quicker without a weight of -128 would give wrong sums with one
  const int8_t* values = static_cast<const int8_t*>(operands[0].const_data_ptr());
  TORCH_CHECK(std::count(values, values + operands[0].nbytes(), int8_t{-128}) == 0,
              "sparta_aot::int8_linear: a weight of -128 in a package that says there is none");
}

// Integers (M, K) times a weight; `operands` are its packed values, the sums of its rows, and one factor per channel.
at::Tensor int8_linear(const at::Tensor& x, at::TensorList operands, at::TensorList arrays, at::IntArrayRef n,
                       const std::optional<at::Tensor>& offset) {
  TORCH_CHECK(n.size() == iNumbers, "sparta_aot::int8_linear: ", int(iNumbers), " numbers, not ", n.size());
  TORCH_CHECK(operands.size() == 3 && arrays.size() == 4, "sparta_aot::int8_linear: 3 operands and 4 arrays");
  TORCH_CHECK(x.dim() == 2 && x.size(1) == n[iInputs], "sparta_aot::int8_linear: x must be (M, ", n[iInputs], ")");
  const bool is_unsigned = x.scalar_type() == at::kByte;
  TORCH_CHECK(is_unsigned || x.scalar_type() == at::kChar, "sparta_aot::int8_linear: x must be int8 or uint8");
  for (const Int8Number number : {iChannels, iInputs, iUnits, iGroups}) {
    check_number(n[number], 0, sparta_aot::kMost / 4, "a number");
  }
  check_number(n[iUnits] * 4, n[iInputs], n[iInputs] + 3, "four times the units");
  check_number(n[iOutput], 0, 2, "the dtype of the output");
  check_number(n[iNoLeastWeight], 0, 1, "whether no weight is -128");
  for (const Int8Number number : {iInputZero, iOutputZero}) check_number(n[number], -128, 255, "a zero point");
  checked().once(together(arrays, {operands[0], operands[1], operands[2]}), n, [&] { check_int8(operands, arrays, n); });
  sparta_aot::check_bias(offset, n[iChannels], "the offset");
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
  call.no_least_weight = n[iNoLeastWeight] != 0;
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
