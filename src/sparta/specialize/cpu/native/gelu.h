// x * Phi(x), the exact GELU, within 1e-6 of the true value: without a division and without exp(), whose denormal
// results are slow. Where a register holds 16 coefficients they are looked up by the size of x, and a polynomial of
// degree 4 is enough; elsewhere one polynomial of degree 14 serves all x.
#pragma once

#include "simd.h"

namespace sparta {

#if defined(SPARTA_AVX512)
// Coefficients of Phi(t) - 1/2 for t = |x|: 16 pieces of equal length, least squares over Chebyshev's points of each,
// the highest power first. The last piece is the constant 1/2.
constexpr float kPiecesPerOne = 2.73584914f, kGeluEnd = 5.48275852f;  // the end is the middle of the last piece
alignas(64) constexpr float kGeluPieces[5][16] = {
    {8.06068056e-05f, 0.000288471783f, 0.000406648964f, 0.00031926934f, 0.000128913336f, -3.34836623e-05f,
     -0.000105336367f, -0.000101628153f, -6.70287554e-05f, -3.42813437e-05f, -1.42439503e-05f, -4.92013396e-06f,
     -1.43179943e-06f, -3.54031954e-07f, -7.48152473e-08f, 0.0f},
    {-0.00328210625f, -0.00261740363f, -0.00115684909f, 0.000350055634f, 0.00125635206f, 0.0014227879f, 0.00111507496f,
     0.000683918188f, 0.000343309657f, 0.000144147358f, 5.12565566e-05f, 1.55561229e-05f, 4.05085257e-06f,
     9.08459185e-07f, 1.75943796e-07f, 0.0f},
    {6.25173197e-06f, -0.00911133178f, -0.0149135208f, -0.0160183627f, -0.0133807706f, -0.00916836411f,
     -0.00527653471f, -0.00258311932f, -0.00108381815f, -0.000391649461f, -0.000122295198f, -3.30764633e-05f,
     -7.76217803e-06f, -1.58262026e-06f, -2.8063576e-07f, 0.0f},
    {0.145819888f, 0.136396632f, 0.111627668f, 0.079931505f, 0.0500772744f, 0.0274497326f, 0.0131646041f,
     0.00552391214f, 0.00202792301f, 0.000651354901f, 0.000183037773f, 4.50002663e-05f, 9.67909546e-06f,
     1.82134841e-06f, 2.99834966e-07f, 0.0f},
    {3.89512289e-09f, 0.142637327f, 0.267620951f, 0.3635813f, 0.428138852f, 0.466194153f, 0.485850036f, 0.494745582f,
     0.498272955f, 0.499498457f, 0.499871492f, 0.499970973f, 0.499994218f, 0.499998987f, 0.499999851f, 0.5f},
};

SPARTA_INLINE Vec gelu(Vec x) {
  const __m512 size = _mm512_abs_ps((__m512)x);
  const Vec near = (Vec)_mm512_min_ps(size, _mm512_set1_ps(kGeluEnd));
  const Vec kRound = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number in the low bits
  const Vec shifted = near * splat(kPiecesPerOne) + kRound;
  const Vec within = near * splat(kPiecesPerOne) - (shifted - kRound);
  const auto of_piece = [&](int power) SPARTA_LAMBDA {
    return (Vec)_mm512_permutexvar_ps((__m512i)shifted, _mm512_load_ps(kGeluPieces[power]));
  };
  Vec series = of_piece(0);
#pragma GCC unroll 4
  for (int power = 1; power < 5; ++power) series = series * within + of_piece(power);
  return (Vec)size * series + x * splat(0.5f);
}
#else
// Phi(x) = 0.5 + x * polynomial(x * x) up to 5.5, and 0 or 1 beyond.
SPARTA_INLINE Vec gelu(Vec x) {
  const Vec end = splat(5.5f);
  const Vec near = x > end ? end : (x < -end ? -end : x);
  const Vec u = near * near * splat(0.0661157025f) - splat(1.0f);  // from [0, 5.5 * 5.5] to [-1, 1]
  constexpr float kCoefficients[] = {0.000538164866f, -0.00136890204f, 0.00102358905f, -0.00122919399f,
                                     0.00423666742f,  -0.00767489476f, 0.0104684643f,  -0.0146712502f,
                                     0.0202880241f,   -0.0261124969f,  0.0320817344f,  -0.0387872644f,
                                     0.0477369912f,   -0.0641724765f,  0.12855193f};
  Vec series = splat(kCoefficients[0]);
#pragma GCC unroll 14
  for (int i = 1; i < 15; ++i) series = series * u + splat(kCoefficients[i]);
  const Vec phi = near * series + splat(0.5f);
  return x * (x < -end ? Vec{} : phi);
}
#endif

}  // namespace sparta
