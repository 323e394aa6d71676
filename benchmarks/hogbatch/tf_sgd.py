"""Train by minibatch SGD in TensorFlow on one thread; `public.py` runs this script.

    python tf_sgd.py PROBLEM.npz LEARNING_RATE BATCH EPOCHS LOSS

Prints each epoch's seconds and final test loss as JSON; stops when the test loss reaches LOSS.
"""

import json
import os
import sys
import time

import numpy as np

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import tensorflow as tf


def train(problem: dict, rate: float, batch: int, epochs: int, wanted: float) -> list:
    """Train a ReLU network from the problem's weights and biases on the problem's samples."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    weights = [tf.Variable(problem[f"w{i}"]) for i in range(int(problem["layers"]))]
    biases = [tf.Variable(problem[f"b{i}"]) for i in range(int(problem["layers"]))]

    def loss_of(inputs, targets):
        for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
            inputs = tf.nn.relu(inputs @ weight + bias)
        scores = inputs @ weights[-1] + biases[-1]
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(targets, scores))

    @tf.function(reduce_retracing=True)
    def step(inputs, targets):
        with tf.GradientTape() as tape:
            loss = loss_of(inputs, targets)
        for one, gradient in zip(
            weights + biases, tape.gradient(loss, weights + biases), strict=True
        ):
            one.assign_sub(rate * gradient)

    inputs, targets = tf.constant(problem["inputs"]), tf.constant(problem["targets"])
    test = tf.constant(problem["test_inputs"]), tf.constant(problem["test_targets"])
    start = [one.numpy() for one in weights + biases]
    step(inputs[:batch], targets[:batch])  # builds the graph before timing
    for one, value in zip(weights + biases, start, strict=True):
        one.assign(value)
    tested = []
    for number in range(epochs):
        order = np.random.default_rng(number).permutation(len(inputs))
        began = time.monotonic()
        shuffled, labels = tf.gather(inputs, order), tf.gather(targets, order)
        for first in range(0, len(order) - batch + 1, batch):
            step(shuffled[first : first + batch], labels[first : first + batch])
        tested.append((time.monotonic() - began, float(loss_of(*test))))
        if tested[-1][1] <= wanted:
            break
    return tested


if __name__ == "__main__":
    file, rate, batch, epochs, wanted = sys.argv[1:]
    with np.load(file) as problem:
        found = train(dict(problem), float(rate), int(batch), int(epochs), float(wanted))
    print(json.dumps({"tested": found, "tensorflow": tf.__version__}))
