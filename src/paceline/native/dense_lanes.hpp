// The kernels of a fully-connected layer. They always sum in vectors of sixteen values, so that the
// order of summation is the same in each instruction set.

#pragma once

#include <cstddef>
#include <cstring>

#include "dense.hpp"

namespace {

constexpr std::size_t lanes = 16;
using Lanes = float __attribute__((vector_size(lanes * sizeof(float))));

// Pass vectors by reference: returning 64 bytes has a different ABI in each instruction set.
inline void load(Lanes& to, const float* from) { std::memcpy(&to, from, sizeof to); }
inline void store(float* to, const Lanes& from) { std::memcpy(to, &from, sizeof from); }

float dot(const float* a, const float* b, std::size_t count) {
    Lanes sum{}, other{}, x, y;
    std::size_t i = 0;
    for (; i + 2 * lanes <= count; i += 2 * lanes) {
        load(x, a + i);
        load(y, b + i);
        sum += x * y;
        load(x, a + i + lanes);
        load(y, b + i + lanes);
        other += x * y;
    }
    for (; i + lanes <= count; i += lanes) {
        load(x, a + i);
        load(y, b + i);
        sum += x * y;
    }
    sum += other;
    float total = 0;
    for (std::size_t j = 0; j < lanes; ++j) total += sum[j];
    for (; i < count; ++i) total += a[i] * b[i];
    return total;
}

// y[s * stride] = dot product of `weights` and sample s, for s < 4; loads each weight only once.
void four_dots(const float* weights, const float* x, std::size_t count, float* y,
               std::size_t stride) {
    Lanes sums[4]{}, w, v;
    std::size_t i = 0;
    for (; i + lanes <= count; i += lanes) {
        load(w, weights + i);
        for (std::size_t s = 0; s < 4; ++s) {
            load(v, x + s * count + i);
            sums[s] += w * v;
        }
    }
    for (std::size_t s = 0; s < 4; ++s) {
        float total = 0;
        for (std::size_t j = 0; j < lanes; ++j) total += sums[s][j];
        for (std::size_t k = i; k < count; ++k) total += weights[k] * x[s * count + k];
        y[s * stride] = total;
    }
}

// to += factor * from
void add_scaled(float* to, float factor, const float* from, std::size_t count) {
    Lanes x, y;
    std::size_t i = 0;
    for (; i + lanes <= count; i += lanes) {
        load(x, to + i);
        load(y, from + i);
        x += factor * y;
        store(to + i, x);
    }
    for (; i < count; ++i) to[i] += factor * from[i];
}

// to = factor * to + from
void scale_and_add(float* to, float factor, const float* from, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) to[i] = factor * to[i] + from[i];
}

void dense_forward(const paceline::DenseLayer& layer, const float* x, std::size_t count, float* y) {
    for (std::size_t o = 0; o < layer.outputs; ++o) {
        const float* weights = layer.weight + o * layer.inputs;
        std::size_t s = 0;
        for (; s + 4 <= count; s += 4) {
            four_dots(weights, x + s * layer.inputs, layer.inputs, y + s * layer.outputs + o,
                      layer.outputs);
        }
        for (; s < count; ++s) {
            y[s * layer.outputs + o] = dot(weights, x + s * layer.inputs, layer.inputs);
        }
        if (layer.bias == nullptr) continue;
        for (s = 0; s < count; ++s) y[s * layer.outputs + o] += layer.bias[o];
    }
}

void dense_backward(const paceline::DenseLayer& layer, const float* y_gradient, std::size_t count,
                    float* x_gradient) {
    std::memset(x_gradient, 0, count * layer.inputs * sizeof(float));
    for (std::size_t o = 0; o < layer.outputs; ++o) {
        const float* weights = layer.weight + o * layer.inputs;
        for (std::size_t s = 0; s < count; ++s) {
            const float gradient = y_gradient[s * layer.outputs + o];
            // Skip zero gradients: after a ReLU about half are zero, and all weights are finite.
            if (gradient == 0) continue;
            add_scaled(x_gradient + s * layer.inputs, gradient, weights, layer.inputs);
        }
    }
}

void dense_step(const paceline::DenseLayer& layer, const float* x, const float* y_gradient,
                std::size_t count, float rate, float momentum, float* row) {
    const std::size_t inputs = layer.inputs;
    for (std::size_t o = 0; o < layer.outputs; ++o) {
        float of_bias = 0;
        bool is_zero = true;
        for (std::size_t s = 0; s < count; ++s) {
            const float gradient = y_gradient[s * layer.outputs + o];
            if (gradient == 0) continue;
            if (is_zero) std::memset(row, 0, inputs * sizeof(float));
            is_zero = false;
            add_scaled(row, gradient, x + s * inputs, inputs);
            of_bias += gradient;
        }
        float* weights = layer.weight + o * inputs;
        if (float* velocity = layer.weight_momentum) {
            if (is_zero) std::memset(row, 0, inputs * sizeof(float));
            scale_and_add(velocity + o * inputs, momentum, row, inputs);
            add_scaled(weights, -rate, velocity + o * inputs, inputs);
        } else if (!is_zero) {
            add_scaled(weights, -rate, row, inputs);
        }
        if (layer.bias == nullptr) continue;
        if (float* velocity = layer.bias_momentum) {
            of_bias = velocity[o] = momentum * velocity[o] + of_bias;
        }
        layer.bias[o] -= rate * of_bias;
    }
}

constexpr paceline::DenseKernels dense_kernels{dense_forward, dense_backward, dense_step};

}  // namespace
