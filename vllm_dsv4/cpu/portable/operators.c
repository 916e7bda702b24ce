// vLLM's CPU operators for DeepSeek-V4 in plain C. Each computes a token at a time, so that no
// result depends on what else is in the batch. Sums are float32; rows are as in
// kernels/fp8_ds_mla.py. Tensors are contiguous unless a stride is given, in elements.

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { HEAD = 512, ROPE = 64, NOPE = HEAD - ROPE, GROUP = 64, DATA = NOPE + 2 * ROPE, SCALES = 8 };

static float as_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

static uint32_t as_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

static float from_bf16(uint16_t value) { return as_float((uint32_t)value << 16); }

static uint16_t to_bf16(float value) {
  uint32_t bits = as_bits(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static float rounded(float value) { return from_bf16(to_bf16(value)); }

// e4m3fn: 4 bits of exponent with bias 7, no infinity, 0x7f is NaN.
static float from_fp8(uint8_t byte) {
  int exponent = (byte >> 3) & 15, mantissa = byte & 7;
  float value = exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
  if ((byte & 127) == 127) value = NAN;
  return byte & 128 ? -value : value;
}

static uint8_t to_fp8(float value) {
  float size = fabsf(value);
  uint8_t sign = signbit(value) ? 128 : 0;
  if (!(size < 464)) return sign | 127;
  int exponent;
  frexpf(size, &exponent);
  if (exponent < -5 || size == 0) exponent = -5;  // subnormal: steps of 2**-9
  // rint rounds ties to even; a carry into the next power of two is the next code, too.
  int steps = (int)rintf(ldexpf(size, 4 - exponent));
  return sign | (uint8_t)(((exponent + 5) << 3) + steps);
}

static int scale_exponent(const float *values, int count) {
  float largest = 1e-4f;
  for (int i = 0; i < count; i++) largest = fmaxf(largest, fabsf(values[i]));
  int exponent;
  float mantissa = frexpf(largest / 448, &exponent);
  return mantissa == 0.5f ? exponent - 1 : exponent;
}

static void quantise(const float *values, int count, int exponent, uint8_t *out) {
  for (int i = 0; i < count; i++) {
    out[i] = to_fp8(fminf(fmaxf(ldexpf(values[i], -exponent), -448), 448));
  }
}

static void store_row(uint8_t *block, int64_t row, int64_t rows, const float *key) {
  uint8_t *data = block + row * DATA, *scales = block + rows * DATA + row * SCALES;
  for (int group = 0; group < NOPE / GROUP; group++) {
    const float *values = key + group * GROUP;
    int exponent = scale_exponent(values, GROUP);
    quantise(values, GROUP, exponent, data + group * GROUP);
    scales[group] = (uint8_t)(exponent + 127);
  }
  scales[SCALES - 1] = 0;
  uint16_t *rope = (uint16_t *)(data + NOPE);
  for (int i = 0; i < ROPE; i++) rope[i] = to_bf16(key[NOPE + i]);
}

// Rotate the last 64 of `head` values by adjacent pairs; `sign` -1 turns back.
static void rotate(float *values, int head, const float *cos_sin, float sign) {
  float *rope = values + head - ROPE;
  for (int i = 0; i < ROPE / 2; i++) {
    float cosine = cos_sin[i], sine = sign * cos_sin[ROPE / 2 + i];
    float even = rope[2 * i], odd = rope[2 * i + 1];
    rope[2 * i] = even * cosine - odd * sine;
    rope[2 * i + 1] = odd * cosine + even * sine;
  }
}

static float mean_square(const float *values, int count) {
  float sum = 0;
  for (int i = 0; i < count; i++) sum += values[i] * values[i];
  return sum / count;
}

void normalise_queries(const uint16_t *q, const int64_t *positions, const float *cos_sin,
                       int64_t tokens, int64_t heads, int64_t padded, float eps, uint16_t *out) {
  for (int64_t token = 0; token < tokens; token++) {
    for (int64_t head = 0; head < heads; head++) {
      float values[HEAD];
      const uint16_t *from = q + (token * heads + head) * HEAD;
      for (int i = 0; i < HEAD; i++) values[i] = from_bf16(from[i]);
      float factor = 1 / sqrtf(mean_square(values, HEAD) + eps);
      for (int i = 0; i < HEAD; i++) values[i] *= factor;
      rotate(values, HEAD, cos_sin + positions[token] * ROPE, 1);
      uint16_t *to = out + (token * padded + head) * HEAD;
      for (int i = 0; i < HEAD; i++) to[i] = to_bf16(values[i]);
    }
  }
}

void insert_keys(const uint16_t *kv, const int64_t *positions, const float *cos_sin,
                 const int64_t *slots, int64_t tokens, uint8_t *cache, int64_t stride,
                 int64_t rows) {
  for (int64_t token = 0; token < tokens; token++) {
    if (slots[token] < 0) continue;
    float key[HEAD];
    for (int i = 0; i < HEAD; i++) key[i] = from_bf16(kv[token * HEAD + i]);
    rotate(key, HEAD, cos_sin + positions[token] * ROPE, 1);
    for (int i = 0; i < HEAD; i++) key[i] = rounded(key[i]);
    store_row(cache + slots[token] / rows * stride, slots[token] % rows, rows, key);
  }
}

void load_rows(const uint8_t *cache, int64_t stride, int64_t rows, const int64_t *slots,
               int64_t count, float *out) {
  float table[256];
  for (int i = 0; i < 256; i++) table[i] = from_fp8((uint8_t)i);
  for (int64_t n = 0; n < count; n++) {
    const uint8_t *block = cache + slots[n] / rows * stride;
    int64_t row = slots[n] % rows;
    const uint8_t *data = block + row * DATA, *scales = block + rows * DATA + row * SCALES;
    for (int i = 0; i < NOPE; i++) {
      out[n * HEAD + i] = table[data[i]] * ldexpf(1, scales[i / GROUP] - 127);
    }
    const uint16_t *rope = (const uint16_t *)(data + NOPE);
    for (int i = 0; i < ROPE; i++) out[n * HEAD + NOPE + i] = from_bf16(rope[i]);
  }
}

static float dot(const float *a, const float *b, int count) {
  float sum = 0;
  for (int i = 0; i < count; i++) sum += a[i] * b[i];
  return sum;
}

// keys: [any, 512]; index: [tokens, width], -1 for none; scores: scratch of `width` floats.
void attend(const uint16_t *q, int64_t q_stride, const float *keys, const int32_t *index,
            int64_t tokens, int64_t heads, int64_t width, const float *sink, float scale,
            float *scores, uint16_t *out, int64_t out_stride) {
  for (int64_t token = 0; token < tokens; token++) {
    const int32_t *seen = index + token * width;
    for (int64_t head = 0; head < heads; head++) {
      float query[HEAD], sum[HEAD] = {0}, largest = sink[head];
      const uint16_t *from = q + token * q_stride + head * HEAD;
      for (int i = 0; i < HEAD; i++) query[i] = from_bf16(from[i]);
      for (int64_t n = 0; n < width; n++) {
        if (seen[n] < 0) continue;
        scores[n] = scale * dot(query, keys + (int64_t)seen[n] * HEAD, HEAD);
        largest = scores[n] > largest || isnan(scores[n]) ? scores[n] : largest;
      }
      float total = expf(sink[head] - largest);
      for (int64_t n = 0; n < width; n++) {
        if (seen[n] < 0) continue;
        float weight = expf(scores[n] - largest);
        const float *key = keys + (int64_t)seen[n] * HEAD;
        total += weight;
        for (int i = 0; i < HEAD; i++) sum[i] += weight * key[i];
      }
      uint16_t *to = out + token * out_stride + head * HEAD;
      for (int i = 0; i < HEAD; i++) to[i] = to_bf16(sum[i] / total);
    }
  }
}

void turn_back(const uint16_t *o, int64_t stride, const int64_t *positions, const float *cos_sin,
               int64_t tokens, int64_t heads, float *out) {
  for (int64_t token = 0; token < tokens; token++) {
    for (int64_t head = 0; head < heads; head++) {
      float *to = out + (token * heads + head) * HEAD;
      const uint16_t *from = o + token * stride + head * HEAD;
      for (int i = 0; i < HEAD; i++) to[i] = from_bf16(from[i]);
      rotate(to, HEAD, cos_sin + positions[token] * ROPE, -1);
    }
  }
}

// state: [blocks, rows, 2 * width], blocks `stride` apart: keys, then scores with their bias.
void save_states(const float *kv, const float *score, int64_t stride_in, const float *bias,
                 int64_t ratio, const int64_t *positions, const int64_t *slots, int64_t tokens,
                 int64_t width, float *state, int64_t stride, int64_t rows) {
  for (int64_t token = 0; token < tokens; token++) {
    if (slots[token] < 0) continue;
    float *row = state + slots[token] / rows * stride + slots[token] % rows * 2 * width;
    const float *more = bias + positions[token] % ratio * width;
    memcpy(row, kv + token * stride_in, sizeof(float) * width);
    for (int64_t i = 0; i < width; i++) row[width + i] = score[token * stride_in + i] + more[i];
  }
}

// One group's mean, normalised and rotated at its first position, rounded to bf16.
static void compressed(const float *state, int64_t stride, int64_t rows, const int64_t *gather,
                       int64_t window, int64_t ratio, int head, int64_t width, const float *norm,
                       float eps, const float *cos_sin, float *out) {
  float largest[HEAD], total[HEAD] = {0};
  memset(out, 0, sizeof(float) * head);
  for (int i = 0; i < head; i++) largest[i] = -INFINITY;
  for (int pass = 0; pass < 2; pass++) {
    for (int64_t n = 0; n < window; n++) {
      if (gather[n] < 0) continue;
      const float *row = state + gather[n] / rows * stride + gather[n] % rows * 2 * width;
      const float *key = row + n / ratio * head, *score = key + width;
      for (int i = 0; i < head; i++) {
        if (pass == 0) {
          largest[i] = score[i] > largest[i] || isnan(score[i]) ? score[i] : largest[i];
        } else {
          float weight = expf(score[i] - largest[i]);
          total[i] += weight;
          out[i] += weight * key[i];
        }
      }
    }
  }
  for (int i = 0; i < head; i++) out[i] /= total[i];
  float factor = 1 / sqrtf(mean_square(out, head) + eps);
  for (int i = 0; i < head; i++) out[i] = out[i] * factor * norm[i];
  rotate(out, head, cos_sin, 1);
  for (int i = 0; i < head; i++) out[i] = rounded(out[i]);
}

void compress(const float *state, int64_t stride, int64_t rows, const int64_t *gather,
              const int64_t *positions, const int64_t *slots, int64_t tokens, int64_t window,
              int64_t ratio, int64_t head, int64_t width, const float *norm, float eps,
              const float *cos_sin, uint8_t *cache, int64_t cache_stride, int64_t cache_rows) {
  for (int64_t token = 0; token < tokens; token++) {
    if ((positions[token] + 1) % ratio || slots[token] < 0) continue;
    float row[HEAD];
    compressed(state, stride, rows, gather + token * window, window, ratio, (int)head, width, norm,
               eps, cos_sin + (positions[token] + 1 - ratio) * ROPE, row);
    uint8_t *block = cache + slots[token] / cache_rows * cache_stride;
    int64_t at = slots[token] % cache_rows;
    if (head == HEAD) {
      store_row(block, at, cache_rows, row);
    } else {
      int exponent = scale_exponent(row, (int)head);
      quantise(row, (int)head, exponent, block + at * head);
      float scale = ldexpf(1, exponent);
      memcpy(block + cache_rows * head + at * 4, &scale, 4);
    }
  }
}

static float sigmoid(float value) { return 1 / (1 + expf(-value)); }

// x: [tokens, 4, width] bf16; fn: [gates, 4 * width]. Gates of a token, before scale and base.
static void mix(const uint16_t *x, const float *fn, int gates, int64_t count, float eps,
                float *values, float *out) {
  for (int64_t i = 0; i < count; i++) values[i] = from_bf16(x[i]);
  float factor = 1 / sqrtf(mean_square(values, (int)count) + eps);
  for (int gate = 0; gate < gates; gate++) {
    out[gate] = factor * dot(values, fn + gate * count, (int)count);
  }
}

enum { STREAMS = 4 };

static void combine(const float *gates, const float *values, int64_t width, uint16_t *out) {
  for (int64_t i = 0; i < width; i++) {
    float sum = 0;
    for (int s = 0; s < STREAMS; s++) sum += gates[s] * values[s * width + i];
    out[i] = to_bf16(sum);
  }
}

static void make_doubly_stochastic(float *c, int64_t iterations, float eps) {
  for (int row = 0; row < STREAMS; row++) {
    float *r = c + row * STREAMS, largest = r[0], sum = 0;
    for (int i = 1; i < STREAMS; i++) largest = fmaxf(largest, r[i]);
    for (int i = 0; i < STREAMS; i++) sum += r[i] = expf(r[i] - largest);
    for (int i = 0; i < STREAMS; i++) r[i] = r[i] / sum + eps;
  }
  for (int64_t n = 0; n < 2 * iterations - 1; n++) {
    int along = n % 2 ? 1 : STREAMS, across = n % 2 ? STREAMS : 1;
    for (int line = 0; line < STREAMS; line++) {
      float sum = eps;
      for (int i = 0; i < STREAMS; i++) sum += c[line * across + i * along];
      for (int i = 0; i < STREAMS; i++) c[line * across + i * along] /= sum;
    }
  }
}

void streams_in(const uint16_t *x, const float *fn, const float *scale, const float *base,
                int64_t tokens, int64_t width, int64_t iterations, float rms_eps, float eps,
                float *values, uint16_t *y, float *post, float *comb) {
  int64_t count = STREAMS * width;
  for (int64_t token = 0; token < tokens; token++) {
    float gates[STREAMS * (STREAMS + 2)], *c = comb + token * STREAMS * STREAMS;
    mix(x + token * count, fn, STREAMS * (STREAMS + 2), count, rms_eps, values, gates);
    for (int i = 0; i < STREAMS; i++) {
      gates[i] = sigmoid(gates[i] * scale[0] + base[i]) + eps;
      post[token * STREAMS + i] = 2 * sigmoid(gates[STREAMS + i] * scale[1] + base[STREAMS + i]);
    }
    for (int i = 0; i < STREAMS * STREAMS; i++) {
      c[i] = gates[2 * STREAMS + i] * scale[2] + base[2 * STREAMS + i];
    }
    make_doubly_stochastic(c, iterations, eps);
    combine(gates, values, width, y + token * width);
  }
}

void streams_out(const uint16_t *x, const uint16_t *residual, const float *post, const float *comb,
                 int64_t tokens, int64_t width, uint16_t *out) {
  for (int64_t token = 0; token < tokens; token++) {
    const float *c = comb + token * STREAMS * STREAMS;
    const uint16_t *r = residual + token * STREAMS * width;
    for (int to = 0; to < STREAMS; to++) {
      for (int64_t i = 0; i < width; i++) {
        float sum = post[token * STREAMS + to] * from_bf16(x[token * width + i]);
        for (int s = 0; s < STREAMS; s++) sum += c[s * STREAMS + to] * from_bf16(r[s * width + i]);
        out[(token * STREAMS + to) * width + i] = to_bf16(sum);
      }
    }
  }
}

void streams_head(const uint16_t *x, const float *fn, const float *scale, const float *base,
                  int64_t tokens, int64_t width, float eps, float rms_eps, float *values,
                  uint16_t *out) {
  for (int64_t token = 0; token < tokens; token++) {
    float gates[STREAMS];
    mix(x + token * STREAMS * width, fn, STREAMS, STREAMS * width, rms_eps, values, gates);
    for (int i = 0; i < STREAMS; i++) gates[i] = sigmoid(gates[i] * scale[0] + base[i]) + eps;
    combine(gates, values, width, out + token * width);
  }
}
