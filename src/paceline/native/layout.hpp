// The layout of the memory that the ranks of a machine share.
//
// Nothing is ever reset, which would need a barrier: each word carries the number of its step, and
// steps only grow. Fresh memory is zero, which is no step.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <stdexcept>

namespace paceline {

// A count (lower half) within a step (upper half). Orders by step first: once the count of a step is
// full, the word is never smaller than that again.
using Tagged = std::atomic<std::uint64_t>;

constexpr std::uint64_t tagged(std::uint32_t step, std::uint32_t count) {
    return std::uint64_t{step} << 32 | count;
}
constexpr std::uint32_t step_in(std::uint64_t word) { return static_cast<std::uint32_t>(word >> 32); }
constexpr std::uint32_t count_in(std::uint64_t word) { return static_cast<std::uint32_t>(word); }

// Add one to the count of a step, from 0 if the word still speaks of an earlier one; return it.
inline std::uint32_t tick(Tagged& word, std::uint32_t step) {
    std::uint64_t seen = word.load(std::memory_order_relaxed);
    std::uint64_t next;
    do {
        next = step_in(seen) == step ? seen + 1 : tagged(step, 1);
    } while (!word.compare_exchange_weak(seen, next));
    return count_in(next);
}

// Counts one more for as long as the object lives.
class Counted {
public:
    explicit Counted(std::atomic<std::uint32_t>& counter) : counter_(counter) { ++counter_; }
    ~Counted() { --counter_; }
    Counted(const Counted&) = delete;
    Counted& operator=(const Counted&) = delete;

private:
    std::atomic<std::uint32_t>& counter_;
};

struct Header {
    // The futex of waiting threads: changed whenever one of them may have something to do.
    alignas(64) std::atomic<std::uint32_t> news;
    std::atomic<std::uint32_t> asleep;             // on `news`
    std::atomic<std::uint32_t> waiting;            // asleep or spinning
    std::atomic<std::uint32_t> waiting_for_chunk;  // those of them that wait for one chunk
    // The futex of reducer threads: changed when there are sums that no waiting thread will take.
    alignas(64) std::atomic<std::uint32_t> work;
    std::atomic<std::uint32_t> idle;  // on `work`
    alignas(64) Tagged ready;  // chunks that all ranks have posted
    Tagged reduced;                           // chunks whose sum is complete
    Tagged published;                         // chunks whose sum over all machines is in place
    Tagged committed;                         // ranks
    Tagged drained;                           // ranks
    Tagged discarded;                         // the step, and 1 + the rank that discarded it first
    std::atomic<std::uint32_t> num_lost;      // ranks that have been given up
};

struct RankState {
    alignas(64) std::atomic<std::uint32_t> committed;  // step
    std::atomic<std::uint32_t> drained;                               // step
    std::atomic<std::uint32_t> lost;     // why it was given up, or 0
    std::atomic<std::uint32_t> claimed;  // blocks, ever
    std::atomic<std::uint32_t> summed;   // blocks, ever: fewer while it sums
};

struct ChunkState {
    alignas(64) Tagged posted;  // ranks
    std::atomic<std::uint32_t> reduced;        // step
    std::atomic<std::int64_t> posted_ns;       // when the last rank had posted it
    std::atomic<std::int64_t> reduced_ns;      // when its sum was complete
    alignas(64) Tagged claimed;  // blocks that some thread has taken
    Tagged summed;                              // blocks
};

static_assert(Tagged::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free);

// Offsets of the parts; the data begin on whole pages. Throws std::length_error for sizes whose sum
// no offset holds.
struct Layout {
    std::size_t num_ranks, slot_nbytes, max_chunks, num_flags;
    std::size_t ranks, chunks, order, posted, flags, slots, results, nbytes;
    std::size_t slot_stride;  // slot_nbytes in whole pages

    Layout(std::size_t num_ranks_, std::size_t slot_nbytes_, std::size_t max_chunks_,
           std::size_t num_flags_, std::size_t page)
        : num_ranks(num_ranks_),
          slot_nbytes(slot_nbytes_),
          max_chunks(max_chunks_),
          num_flags(num_flags_) {
        const double per_rank = 1.0 * slot_nbytes + 4.0 * max_chunks + 2.0 * num_flags + 2.0 * page;
        if ((num_ranks + 2.0) * per_rank + 256.0 * max_chunks > 0x1p62) {
            throw std::length_error("the arena would be larger than any memory");
        }
        ranks = sizeof(Header);
        chunks = ranks + num_ranks * sizeof(RankState);
        order = chunks + max_chunks * sizeof(ChunkState);
        posted = order + max_chunks * sizeof(Tagged);
        flags = posted + max_chunks * num_ranks * sizeof(std::atomic<std::uint32_t>);
        slot_stride = (slot_nbytes + page - 1) / page * page;
        slots = (flags + 2 * num_ranks * num_flags + page - 1) / page * page;
        results = slots + num_ranks * slot_stride;
        nbytes = results + 2 * slot_stride;
    }
};

}  // namespace paceline
