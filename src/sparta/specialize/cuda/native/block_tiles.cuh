// What kernels on kept blocks for many tokens share: the ring that blocks come through, the multiplication of 64 outputs by
// TOKENS tokens in a warpgroup, and how its results are finished and written.
//
// Compile-time numbers: IS_HALF, ACTIVATION, FORMAT, RESIDUAL, TOKENS, GROUPS, STAGES, ROW, as in blocks.cu, and CHUNK
// (tokens that are written at once).
#pragma once

constexpr int CONSUMERS = GROUPS * 128, THREADS = CONSUMERS + 128;
constexpr int PITCH = 64 * 2 + 16;                  // bytes between tokens of results on their way out
constexpr int STAGING = CHUNK * PITCH + (FORMAT ? TOKENS * 4 : 0); // of a warpgroup: results and the scales of tokens
constexpr u64 SWIZZLE = ROW == 128 ? 1 : 2;

struct Ring {
    int stage = 0;
    u32 phase = 0;
    __device__ __forceinline__ void skip(int steps) {
        const int turns = (stage + steps) / STAGES;
        stage += steps - turns * STAGES;
        phase ^= turns & 1;
    }
};

#if TOKENS == 64
#define WIDE "n64"
#define SUMS SUMS_32
#define LIST(a) LIST_32(a, 0)
#define OPERANDS "%32, %33"
#define ADDS "%34"
#elif TOKENS == 96
#define WIDE "n96"
#define SUMS SUMS_48
#define LIST(a) LIST_32(a, 0), LIST_16(a, 32)
#define OPERANDS "%48, %49"
#define ADDS "%50"
#elif TOKENS == 128
#define WIDE "n128"
#define SUMS SUMS_64
#define LIST(a) LIST_64(a, 0)
#define OPERANDS "%64, %65"
#define ADDS "%66"
#else
#define WIDE "n256"
#define SUMS SUMS_128
#define LIST(a) LIST_64(a, 0), LIST_64(a, 64)
#define OPERANDS "%128, %129"
#define ADDS "%130"
#endif
#if FORMAT
#define KIND "k32.f32.e4m3.e4m3"
#define TAIL "1, 1;"
#elif IS_HALF
#define KIND "k16.f32.f16.f16"
#define TAIL "1, 1, 0, 0;"
#else
#define KIND "k16.f32.bf16.bf16"
#define TAIL "1, 1, 0, 0;"
#endif

// Multiplies 32 bytes of inputs of 64 outputs and TOKENS tokens; adds to the sums if told to.
__device__ __forceinline__ void multiply(float (&sums)[TOKENS / 2], u32 w, u32 x, int adds) {
    const u64 left = described(w, 8 * ROW, SWIZZLE), right = described(x, 8 * ROW, SWIZZLE);
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, " ADDS ", 0;\n"
                 "wgmma.mma_async.sync.aligned.m64" WIDE KIND " {" SUMS "}, " OPERANDS ", adds, " TAIL "\n}"
                 : LIST(sums)
                 : "l"(left), "l"(right), "r"(adds));
}

__device__ __forceinline__ void load_transposed(u32 row, u32 (&pairs)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3]) : "r"(row) : "memory");
}

// 16 bytes that the kernel before may have written: past the L1 cache.
__device__ __forceinline__ uint4 recent16(const void* from) {
    uint4 value;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w) : "l"(from));
    return value;
}

__device__ __forceinline__ void write16(u32 to, uint4 value) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w) : "memory");
}

// Scales, adds and writes the sums of one warpgroup: 64 outputs of TOKENS tokens.
template <class Call>
__device__ __forceinline__ void write(const Call& call, const float (&sums)[TOKENS / 2], u32 staging, int first_output,
                                      int first_token, int group) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, thread = threadIdx.x % 128;
    const int output = first_output + warp * 16 + lane / 4, n = first_output + thread % 8 * 8;
    float bias[2] = {0.f, 0.f};
#if FORMAT
    float scale[2] = {1.f, 1.f};
#endif
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        if (output + h * 8 >= call.outputs) continue;
#if FORMAT
        scale[h] = call.scales[output + h * 8];
#endif
        if (call.bias) bias[h] = to_float(call.bias[output + h * 8]);
    }
#if FORMAT
    const u32 scales = staging + CHUNK * PITCH;
    for (int t = thread; t < TOKENS; t += 128)
        write4(scales + t * 4, first_token + t < call.tokens ? call.x_scales[first_token + t] : 0.f);
    meet(group);
#endif
#pragma unroll
    for (int chunk = 0; chunk < TOKENS / CHUNK; ++chunk) {
        if (first_token + chunk * CHUNK >= call.tokens) break;
        const int from = first_token + chunk * CHUNK + thread / 8;
        const u32 mine = staging + thread / 8 * PITCH + thread % 8 * 16;
#if RESIDUAL
        uint4 added[CHUNK / 16];
#pragma unroll
        for (int pass = 0; pass < CHUNK / 16; ++pass) {
            const int token = from + pass * 16;
            if (token < call.tokens && n < call.outputs)
                added[pass] = recent16(call.residual + (long long)token * call.outputs + n);
        }
#pragma unroll
        for (int pass = 0; pass < CHUNK / 16; ++pass) write16(mine + pass * 16 * PITCH, added[pass]);
        meet(group);
#endif
#pragma unroll
        for (int j = 0; j < CHUNK / 8; j += 2) {
            const int row = j * 8 + lane / 16 * 8 + lane % 8, column = warp * 16 + lane / 8 % 2 * 8;
            const u32 place = staging + row * PITCH + column * 2;
            u32 pairs[4];
#if RESIDUAL
            load_transposed(place, pairs);
#endif
#pragma unroll
            for (int p = 0; p < 4; ++p) {
                const int h = p % 2, at = (chunk * (CHUNK / 8) + j + p / 2) * 4 + h * 2;
#if FORMAT
                const float2 of_tokens = read8(scales + (chunk * CHUNK + (j + p / 2) * 8 + lane % 4 * 2) * 4);
#endif
                u16 bits[2];
#pragma unroll
                for (int t = 0; t < 2; ++t) {
                    float value = sums[at + t];
#if FORMAT
                    value = value * (t ? of_tokens.y : of_tokens.x) * scale[h];
#endif
                    value = finish(value + bias[h]);
#if RESIDUAL
                    value += to_float((u16)(pairs[p] >> (t * 16)));
#endif
                    bits[t] = to_bits(value);
                }
                pairs[p] = bits[0] | (u32)bits[1] << 16;
            }
            store_transposed(place, pairs);
        }
        meet(group);
#pragma unroll
        for (int pass = 0; pass < CHUNK / 16; ++pass) {
            const int token = from + pass * 16;
            if (token < call.tokens && n < call.outputs)
                *reinterpret_cast<uint4*>(call.y + (long long)token * call.outputs + n) = read16(mine + pass * 16 * PITCH);
        }
        meet(group);
    }
}
