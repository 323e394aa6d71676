#include "arena.hpp"

#include <climits>
#include <csignal>
#include <mutex>
#include <utility>

#include <pthread.h>
#include <unistd.h>

#include "futex.hpp"

namespace paceline {
namespace {

// Time that a waiting rank spins before it sleeps. The short time is about the time of waking a
// thread. The long time, for a rank with its own core, is a common difference between ranks.
constexpr std::int64_t short_spin_ns = 50'000;
constexpr std::int64_t long_spin_ns = 500'000;
constexpr std::int64_t slice_ns = 50'000'000;
constexpr std::uint32_t all = INT_MAX;
// Chunks below this size are summed faster than a thread is woken.
constexpr std::size_t worth_a_call_nbytes = std::size_t{256} << 10;

}  // namespace

Arena::Arena(std::shared_ptr<Mapping> shared, std::shared_ptr<Mapping> results, std::size_t rank,
             const Layout& layout, Options options)
    : layout_(layout),
      rank_(rank),
      options_(options),
      kernels_(fastest_kernels()),
      pid_(getpid()),
      shared_(std::move(shared)),
      results_(std::move(results)),
      header_(*at<Header>(0)),
      ranks_(at<RankState>(layout.ranks)),
      chunk_states_(at<ChunkState>(layout.chunks)),
      order_(at<Tagged>(layout.order)) {}

Arena::~Arena() {
    if (!thread_) return;
    if (getpid() != pid_) {  // a forked process has a copy of the object, but no reducer thread
        thread_.release();
        return;
    }
    closing_ = true;
    ++header_.work;
    futex_wake(header_.work, all);
    thread_->join();
}

char* Arena::slot(std::size_t rank) const {
    return shared_->data() + layout_.slots + rank * layout_.slot_stride;
}

char* Arena::result(std::size_t parity) const {
    return shared_->data() + layout_.results + parity * layout_.slot_stride;
}

void Arena::set_chunks(std::vector<Chunk> chunks) {
    const std::unique_lock alone(gate_);
    step_ = 0;  // so that no thread sums the new chunks as chunks of the last step
    chunks_ = std::move(chunks);
}

void Arena::begin(std::uint32_t step) {
    {
        const std::unique_lock alone(gate_);
        step_ = step;
        next_ = tagged(step, 0);
        num_posted_ = 0;
    }
    if (!thread_) {
        // Block all signals in the new thread, because Python's threads must handle them.
        sigset_t every, before;
        sigfillset(&every);
        pthread_sigmask(SIG_SETMASK, &every, &before);
        thread_ = std::make_unique<std::thread>([this] { reduce(); });
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        pthread_setname_np(thread_->native_handle(), "paceline-sum");
    }
}

void Arena::post(std::size_t chunk) {
    const std::shared_lock shared(gate_);
    if (step_ == 0) return;
    ++num_posted_;
    // All counters are sequentially consistent: a rank that reads the full count of a chunk also
    // sees the gradients that were written to the slots before.
    posted(chunk, rank_) = step_;
    if (tick(chunk_states_[chunk].posted, step_) == layout_.num_ranks) open(chunk);
}

// Add a chunk that all ranks have posted to the chunks to be summed.
void Arena::open(std::size_t chunk) {
    ChunkState& state = chunk_states_[chunk];
    const std::uint32_t num_blocks = chunks_[chunk].num_blocks();
    state.posted_ns = now_ns();
    // Set this before `ready` counts the chunk, because then any thread may claim its blocks.
    state.claimed = tagged(step_, 0);
    if (num_blocks == 0) {
        complete(chunk);
        return;
    }
    const std::uint32_t place = tick(header_.ready, step_) - 1;
    if (place >= layout_.max_chunks) return;  // an invalid count in the shared memory
    order_[place] = tagged(step_, static_cast<std::uint32_t>(chunk));
    notify(num_blocks);
    // If a waiting rank can sum, wake no reducer thread, which could slow down a computing rank.
    const bool about_to_wait = num_posted_ == chunks_.size();
    const bool left_alone = header_.waiting > 0 || about_to_wait ||
                            chunks_[chunk].nbytes < worth_a_call_nbytes;
    if (options_.spare_core || !left_alone) call_reducers(num_blocks);
}

void Arena::complete(std::size_t chunk) {
    ChunkState& state = chunk_states_[chunk];
    state.reduced_ns = now_ns();  // set before `reduced`, after which it may be read
    state.reduced = step_;
    const bool last = tick(header_.reduced, step_) == chunks_.size();
    if (last || header_.waiting_for_chunk > 0) notify(all);
}

void Arena::publish() {
    const std::shared_lock shared(gate_);
    if (step_ == 0) return;
    if (tick(header_.published, step_) == chunks_.size()) notify(all);
}

void Arena::commit() {
    const std::shared_lock shared(gate_);
    if (step_ == 0) return;
    ranks_[rank_].committed = step_;
    if (tick(header_.committed, step_) == layout_.num_ranks) notify(all);
}

bool Arena::is_discarded(std::uint32_t step) const { return step_in(header_.discarded) == step; }

std::size_t Arena::discarded_by() const { return count_in(header_.discarded) - 1; }

void Arena::discard() {
    const std::shared_lock shared(gate_);
    if (step_ == 0) return;
    std::uint64_t seen = header_.discarded;
    const auto mark = tagged(step_, static_cast<std::uint32_t>(rank_) + 1);
    while (step_in(seen) != step_ && !header_.discarded.compare_exchange_weak(seen, mark)) {
    }
    notify(all);
}

void Arena::drain() {
    std::uint32_t step;
    {
        const std::unique_lock alone(gate_);
        step = std::exchange(step_, 0);
    }
    if (step == 0) return;
    ranks_[rank_].drained = step;
    if (tick(header_.drained, step) == layout_.num_ranks) notify(all);
}

bool Arena::reached(Goal goal, std::uint32_t step, std::size_t chunk) const {
    const auto num_ranks = static_cast<std::uint32_t>(layout_.num_ranks);
    if (goal == Goal::drained) return header_.drained >= tagged(step, num_ranks);
    if (goal == Goal::chunk) return chunk_states_[chunk].reduced == step;
    const Tagged& complete = options_.held ? header_.published : header_.reduced;
    return header_.committed >= tagged(step, num_ranks) &&
           (chunks_.empty() ||
            complete >= tagged(step, static_cast<std::uint32_t>(chunks_.size())));
}

Status Arena::wait(Goal goal, std::uint32_t step, std::size_t chunk) {
    const Counted waiting(header_.waiting);
    const Counted own(num_waiting_);
    std::atomic<std::uint32_t> unused{0};
    const Counted for_chunk(goal == Goal::chunk ? header_.waiting_for_chunk : unused);
    const std::int64_t spin_ns = options_.own_core ? long_spin_ns : short_spin_ns;
    const std::int64_t start = now_ns();
    for (std::int64_t last_work = start;;) {
        // Read `news` before checking the goal. If the goal is reached in between, `news` changes,
        // and the sleep ends at once.
        const std::uint32_t seen = header_.news;
        if (reached(goal, step, chunk)) return Status::reached;
        if (goal != Goal::drained && is_discarded(step)) return Status::discarded;
        if (header_.num_lost > 0) return Status::lost;
        const bool worked = sum_one_block();
        const std::int64_t now = now_ns();
        if (now > start + slice_ns) return Status::pending;
        if (worked) {
            last_work = now;
        } else if (now < last_work + spin_ns && !reducing_) {  // else leave the core to the reducer
            pause();
        } else {
            const Counted asleep(header_.asleep);
            if (!futex_wait(header_.news, seen, start + slice_ns - now)) return Status::pending;
        }
    }
}

std::vector<std::pair<std::size_t, Fault>> Arena::missing(Goal goal, std::uint32_t step,
                                                          std::size_t chunk) const {
    std::vector<std::pair<std::size_t, Fault>> found;
    const auto add_ranks = [&](Fault fault, auto is_missing) {
        for (std::size_t rank = 0; rank < layout_.num_ranks; ++rank) {
            if (is_missing(rank)) found.emplace_back(rank, fault);
        }
    };
    if (goal == Goal::drained) {
        add_ranks(Fault::drain, [&](std::size_t rank) { return ranks_[rank].drained != step; });
        return found;
    }
    add_ranks(Fault::post, [&](std::size_t rank) {
        if (goal == Goal::chunk) return posted(chunk, rank) != step;
        bool is_missing = ranks_[rank].committed != step;
        for (std::size_t each = 0; each < chunks_.size(); ++each) {
            is_missing |= posted(each, rank) != step;
        }
        return is_missing;
    });
    if (!found.empty()) return found;
    add_ranks(Fault::sum, [&](std::size_t rank) {
        return ranks_[rank].claimed != ranks_[rank].summed;
    });
    if (found.empty() && options_.held && goal == Goal::step) found.emplace_back(0, Fault::publish);
    return found;
}

void Arena::give_up(std::size_t rank, Fault fault) {
    std::uint32_t none = 0;
    if (ranks_[rank].lost.compare_exchange_strong(none, static_cast<std::uint32_t>(fault))) {
        ++header_.num_lost;
        notify(all);
    }
}

std::vector<std::pair<std::size_t, Fault>> Arena::lost() const {
    std::vector<std::pair<std::size_t, Fault>> found;
    for (std::size_t rank = 0; rank < layout_.num_ranks; ++rank) {
        const std::uint32_t fault = ranks_[rank].lost;
        if (fault != 0) found.emplace_back(rank, static_cast<Fault>(fault));
    }
    return found;
}

std::pair<std::int64_t, std::int64_t> Arena::times(std::size_t chunk) const {
    return {chunk_states_[chunk].posted_ns, chunk_states_[chunk].reduced_ns};
}

void Arena::notify(std::uint32_t at_most) {
    ++header_.news;
    if (header_.asleep > 0) futex_wake(header_.news, at_most);
}

void Arena::call_reducers(std::uint32_t at_most) {
    ++header_.work;
    if (header_.idle > 0) futex_wake(header_.work, at_most);
}

}  // namespace paceline
