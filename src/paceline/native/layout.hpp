// The layout of the memory that the ranks of a machine share.
//
// Counters are never reset, because that would need a barrier. Instead, each counter contains the
// number of its step. Step numbers begin at 1 and increase; new memory is zero.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <stdexcept>

namespace paceline {

// A step (upper 32 bits) and a count in this step (lower 32 bits). Later steps compare as greater,
// so after the count of a step is complete, `word >= tagged(step, count)` remains true.
using Tagged = std::atomic<std::uint64_t>;

constexpr std::uint64_t tagged(std::uint32_t step, std::uint32_t count) {
    return std::uint64_t{step} << 32 | count;
}
constexpr std::uint32_t step_in(std::uint64_t word) { return static_cast<std::uint32_t>(word >> 32); }
constexpr std::uint32_t count_in(std::uint64_t word) { return static_cast<std::uint32_t>(word); }

// Add one to the count of a step, and return it; in a word of another step, begin at 0.
inline std::uint32_t tick(Tagged& word, std::uint32_t step) {
    std::uint64_t seen = word.load(std::memory_order_relaxed);
    std::uint64_t next;
    do {
        next = step_in(seen) == step ? seen + 1 : tagged(step, 1);
    } while (!word.compare_exchange_weak(seen, next));
    return count_in(next);
}

// Adds one to a counter in the constructor, and subtracts it in the destructor.
class Counted {
public:
    explicit Counted(std::atomic<std::uint32_t>& counter) : counter_(counter) { ++counter_; }
    ~Counted() { --counter_; }
    Counted(const Counted&) = delete;
    Counted& operator=(const Counted&) = delete;

private:
    std::atomic<std::uint32_t>& counter_;
};

// State of the arena. Each Tagged member has a step and a count; the comment says what it counts.
struct Header {
    // The futex of threads in `wait`; changed whenever such a thread may have something to do.
    alignas(64) std::atomic<std::uint32_t> news;
    std::atomic<std::uint32_t> asleep;             // threads that sleep on `news`
    std::atomic<std::uint32_t> waiting;            // threads in `wait`, asleep or spinning
    std::atomic<std::uint32_t> waiting_for_chunk;  // threads in `wait` for Goal::chunk
    // The futex of reducer threads; changed when there are sums that no waiting thread will do.
    alignas(64) std::atomic<std::uint32_t> work;
    std::atomic<std::uint32_t> idle;      // reducer threads that sleep on `work`
    alignas(64) Tagged ready;             // chunks that all ranks have posted
    Tagged reduced;                       // chunks whose sum is complete
    Tagged published;                     // chunks whose sum over all machines is in place
    Tagged committed;                     // ranks that have called `commit`
    Tagged drained;                       // ranks that have called `drain`
    Tagged discarded;                     // not a count: 1 + the first rank that called `discard`
    std::atomic<std::uint32_t> num_lost;  // ranks that have been given up
};

struct RankState {
    alignas(64) std::atomic<std::uint32_t> committed;  // last step in which it called `commit`
    std::atomic<std::uint32_t> drained;                // last step in which it called `drain`
    std::atomic<std::uint32_t> lost;                   // Fault for which it was given up, or 0
    std::atomic<std::uint32_t> claimed;                // number of blocks claimed in all steps
    std::atomic<std::uint32_t> summed;                 // number of blocks summed in all steps
};

struct ChunkState {
    alignas(64) Tagged posted;             // ranks that have posted the chunk
    std::atomic<std::uint32_t> reduced;    // last step in which the chunk's sum was complete
    std::atomic<std::int64_t> posted_ns;   // time when the last rank posted the chunk
    std::atomic<std::int64_t> reduced_ns;  // time when the chunk's sum was complete
    alignas(64) Tagged claimed;            // blocks that threads have claimed
    Tagged summed;                         // blocks that threads have summed
};

static_assert(Tagged::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free);

// Offsets of the parts of the shared file, in bytes; slots and results begin at whole pages. Throws
// std::length_error if the file would be too large for an offset.
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
            throw std::length_error("the arena's shared file would have 2^62 bytes or more");
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
