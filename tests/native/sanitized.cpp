// Runs sums, copies, codecs, casts and arenas in a build with a sanitizer, whose errors make the
// program fail. Results of kernels are compared with those of the portable ones.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

#include "arena.hpp"
#include "blocks.hpp"

using namespace paceline;

namespace {

using Bytes = std::vector<unsigned char>;

void require(bool holds, const std::string& what) {
    if (holds) return;
    std::fprintf(stderr, "wrong: %s\n", what.c_str());
    std::exit(1);
}

// Bytes that are finite values of every type: the upper byte of each 16 bits is 0x3c.
Bytes filled(std::size_t nbytes, std::size_t seed) {
    Bytes bytes(nbytes);
    for (std::size_t i = 0; i < nbytes; ++i) {
        bytes[i] = static_cast<unsigned char>(i % 2 ? 0x3c : (i + seed) * 37);
    }
    return bytes;
}

// The last `count` values of memory that ends with them.
template <class T>
T* last(Bytes& bytes, std::size_t count) {
    return reinterpret_cast<T*>(bytes.data() + bytes.size() - count * sizeof(T));
}

// Call run(kernels), which returns what it has computed, for each instruction set.
void compare(const std::string& what, const std::function<Bytes(const Kernels&)>& run) {
    const Bytes wanted = run(kernels_named("portable"));
    for (const auto& [name, kernels] : usable_kernels()) {
        require(run(*kernels) == wanted, what + " with " + name);
    }
}

void run_sums(std::size_t count, std::size_t shift, bool streaming) {
    for (const auto dtype : {DType::float32, DType::float64, DType::bfloat16, DType::float16}) {
        const std::size_t nbytes = count * size_of(dtype), begin = shift * size_of(dtype);
        Bytes sources[3] = {filled(begin + nbytes, 1), filled(begin + nbytes, 2),
                            filled(begin + nbytes, 3)};
        compare("sum", [&](const Kernels& kernels) {
            Bytes result(begin + nbytes);
            const void* from[3];
            for (int i = 0; i < 3; ++i) from[i] = sources[i].data() + begin;
            sum(kernels, dtype, from, 3, 1.0 / 3, result.data() + begin, count, streaming);
            return result;
        });
    }
}

void run_copies(std::size_t nbytes, std::size_t shift) {
    compare("copy", [&](const Kernels& kernels) {
        const Bytes source = filled(nbytes + shift, 4);
        Bytes target(nbytes + shift);
        copy(kernels, target.data() + shift, source.data() + shift, nbytes);
        return target;
    });
}

// `size` magnitudes at equal distances, and the middles between them.
template <class Table>
Table linear(int size) {
    std::vector<float> magnitudes, thresholds;
    for (int i = 0; i < size; ++i) {
        magnitudes.push_back(static_cast<float>(i) / static_cast<float>(size - 1));
        if (i > 0) thresholds.push_back((magnitudes[i - 1] + magnitudes[i]) / 2);
    }
    return Table(magnitudes, thresholds);
}

void run_codecs(Blocks blocks, std::size_t shift, std::size_t threads) {
    static const auto book = linear<Codebook>(128);
    static const auto table = linear<FourBitTable>(8);
    const std::size_t count = blocks.count;
    const std::size_t num_blocks = (count + blocks.block_size - 1) / blocks.block_size;
    Bytes memory = filled((count + shift) * sizeof(float), 5);
    const float* values = last<float>(memory, count);
    for (const bool four_bit : {false, true}) {
        compare(four_bit ? "4-bit codes" : "8-bit codes", [&](const Kernels& kernels) {
            Bytes codes(four_bit ? (count + 1) / 2 : count), decoded = memory;
            std::vector<float> scales(num_blocks);
            float* to = last<float>(decoded, count);
            const auto both = [&](const auto& used) {
                encode(kernels, used, blocks, values, scales.data(), true, codes.data(), threads);
                for (const bool adds : {false, true}) {
                    decode(kernels, used, blocks, codes.data(), scales.data(), to, adds, threads);
                }
            };
            if (four_bit) {
                both(table);
            } else {
                both(book);
            }
            decoded.insert(decoded.end(), codes.begin(), codes.end());
            return decoded;
        });
    }
    for (const auto dtype : {DType::float16, DType::bfloat16}) {
        compare("cast", [&](const Kernels& kernels) {
            Bytes rounded((count + shift) * 2);
            cast(kernels, dtype, values, count, last<std::uint16_t>(rounded, count), threads);
            return rounded;
        });
    }
}

constexpr std::size_t num_ranks = 3, num_values = 200'000;
constexpr std::uint32_t num_steps = 60;

// Chunks of many blocks, of one, of none and of two segments.
std::vector<Chunk> chunks_of_values() {
    const auto part = [](std::size_t first, std::size_t end) {
        return Segment{first * sizeof(float), end - first, DType::float32};
    };
    std::vector<Chunk> chunks;
    for (const auto& segments : std::vector<std::vector<Segment>>{
             {part(0, 150'000)}, {part(150'000, 150'007)}, {},
             {part(150'016, 160'000), part(160'016, num_values)}}) {
        chunks.push_back(cut(segments, num_ranks));
    }
    return chunks;
}

Status wait(Arena& arena, Goal goal, std::uint32_t step, std::size_t chunk = 0) {
    Status status;
    do {
        status = arena.wait(goal, step, chunk);
    } while (status == Status::pending);
    return status;
}

// Post all chunks, each rank in another order; in every fifth step one rank fails. Return false if
// the step is discarded.
bool deliver(Arena& arena, std::size_t rank, std::uint32_t step, bool held) {
    const std::size_t num_chunks = arena.num_chunks();
    for (std::size_t i = 0; i < num_chunks; ++i) {
        if (step % 5 == 0 && step % num_ranks == rank && i == step % num_chunks) {
            arena.discard();
            return false;
        }
        arena.post((i + rank) % num_chunks);
    }
    for (std::size_t chunk = 0; chunk < num_chunks; ++chunk) {
        const bool publishes = held && rank == 0;
        if (!publishes && (step + chunk) % 3 != 0) continue;
        if (wait(arena, Goal::chunk, step, chunk) == Status::discarded) return false;
        if (publishes) arena.publish();
    }
    arena.commit();
    return wait(arena, Goal::step, step) == Status::reached;
}

// All ranks share one mapping: the thread sanitizer takes two of one file for separate memory.
void train(const std::shared_ptr<Mapping>& shared, int fd, std::size_t rank, const Layout& layout,
           bool held) {
    const auto results =
        std::make_shared<Mapping>(fd, static_cast<off_t>(layout.results), 2 * layout.slot_stride,
                                  Mapping::Kind::copy_on_write);
    Arena arena(shared, results, rank, layout, {1.0, held, rank == 1, rank == 2});
    arena.set_chunks(chunks_of_values());
    for (std::uint32_t step = 1; step <= num_steps; ++step) {
        arena.begin(step);
        auto* slot = reinterpret_cast<float*>(arena.slot(rank));
        std::fill_n(slot, num_values, static_cast<float>(step + rank));
        if (!deliver(arena, rank, step, held)) {
            require(step % 5 == 0 && arena.is_discarded(step), "a step is discarded");
            arena.drain();
            wait(arena, Goal::drained, step);
            continue;
        }
        const auto* result = reinterpret_cast<const float*>(arena.result(step % 2));
        for (const std::size_t i : {0u, 149'999u, 150'006u, 159'999u, 160'016u, 199'999u}) {
            require(result[i] == static_cast<float>(3 * step + 3), "the sum of the ranks");
        }
        results->refresh(step % 2 * layout.slot_stride, layout.slot_stride);
    }
}

void run_arenas(bool held) {
    const Layout layout(num_ranks, num_values * sizeof(float), 8, 3, page_nbytes());
    const int fd = memfd_create("arena", MFD_CLOEXEC);
    require(ftruncate(fd, static_cast<off_t>(layout.nbytes)) == 0, "memory");
    const auto shared = std::make_shared<Mapping>(fd, 0, layout.nbytes, Mapping::Kind::shared);
    std::vector<std::jthread> ranks;
    for (std::size_t rank = 0; rank < num_ranks; ++rank) {
        ranks.emplace_back([&, rank] { train(shared, fd, rank, layout, held); });
    }
    ranks.clear();
    close(fd);
}

}  // namespace

int main() {
    for (const std::size_t shift : {0, 1, 3}) {
        for (std::size_t count = 0; count < 140; ++count) {
            run_sums(count, shift, false);
            run_sums(count, shift, true);
            for (const std::size_t block_size : {2, 34, 64}) {
                run_codecs({count, block_size}, shift, 1);
            }
        }
        run_copies(cache_nbytes() + 1001, shift);
    }
    run_codecs({4 * worth_a_thread + 77, 1024}, 0, 3);
    for (const bool held : {false, true}) run_arenas(held);
    std::puts("done");
}
