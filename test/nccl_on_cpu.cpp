/* See nccl_on_cpu.h. This file stands in for cuda.cuh and nccl.h, and is llmc/comm_nccl.cu with them. */
#define LLMC_CUDA_CUDA_CUH
#define WITH_NCCL
#include "test/nccl_on_cpu.h"

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <fcntl.h>
#include <functional>
#include <memory>
#include <mutex>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>

#include "llmc/comm.h"

/* ---- streams and events ---- */

enum cudaError_t { cudaSuccess, cudaErrorNotReady };

struct cpu_event {
    std::mutex lock;
    std::condition_variable changed;
    uint64_t recorded = 0, done = 0; /* recordings, the last that has happened */
    double seconds = 0;              /* when */
    std::shared_ptr<cpu_event> self; /* a stream may come to it after its end */
};
typedef cpu_event *cudaEvent_t;

struct cpu_stream {
    bool background;
    std::mutex lock;
    std::condition_variable changed;
    std::deque<std::function<void()>> work;
    bool busy = false, ended = false;
    std::thread thread;

    explicit cpu_stream(bool in_background) : background(in_background) {
        if (background) {
            thread = std::thread([this] { run_all(); });
        }
    }
    ~cpu_stream() {
        if (background) {
            {
                std::lock_guard<std::mutex> hold(lock);
                ended = true;
                changed.notify_all();
            }
            thread.join();
        }
    }
    void run(std::function<void()> task) {
        if (!background) {
            task();
            return;
        }
        std::lock_guard<std::mutex> hold(lock);
        work.push_back(task);
        changed.notify_all();
    }
    void synchronize() {
        std::unique_lock<std::mutex> hold(lock);
        changed.wait(hold, [this] { return work.empty() && !busy; });
    }

  private:
    void run_all() {
        std::unique_lock<std::mutex> hold(lock);
        for (;;) {
            changed.wait(hold, [this] { return ended || !work.empty(); });
            if (work.empty()) {
                return;
            }
            std::function<void()> task = work.front();
            work.pop_front();
            busy = true;
            hold.unlock();
            task();
            hold.lock();
            busy = false;
            changed.notify_all();
        }
    }
};
typedef cpu_stream *cudaStream_t;

enum { cudaEventDisableTiming = 2, cudaStreamNonBlocking = 1, GREATEST_PRIORITY = -5 };

static cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, int) {
    *out = new cpu_event;
    (*out)->self.reset(*out);
    return cudaSuccess;
}
static cudaError_t cudaEventCreate(cudaEvent_t *out) {
    return cudaEventCreateWithFlags(out, 0);
}
static void cudaEventDestroy(cudaEvent_t event) {
    event->self.reset();
}
static cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    uint64_t number;
    {
        std::lock_guard<std::mutex> hold(event->lock);
        number = ++event->recorded;
    }
    std::shared_ptr<cpu_event> self = event->self;
    stream->run([=] {
        std::lock_guard<std::mutex> hold(self->lock);
        self->done = number;
        self->seconds = time_seconds();
        self->changed.notify_all();
    });
    return cudaSuccess;
}
static cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, int) {
    uint64_t number;
    {
        std::lock_guard<std::mutex> hold(event->lock);
        number = event->recorded;
    }
    std::shared_ptr<cpu_event> self = event->self;
    stream->run([=] {
        std::unique_lock<std::mutex> hold(self->lock);
        self->changed.wait(hold, [=] { return self->done >= number; });
    });
    return cudaSuccess;
}
static cudaError_t cudaEventQuery(cudaEvent_t event) {
    std::lock_guard<std::mutex> hold(event->lock);
    return event->done == event->recorded ? cudaSuccess : cudaErrorNotReady;
}
static cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end) {
    if (cudaEventQuery(begin) != cudaSuccess || cudaEventQuery(end) != cudaSuccess) {
        return cudaErrorNotReady;
    }
    *milliseconds = (float)(1e3 * (end->seconds - begin->seconds));
    return cudaSuccess;
}
static cudaError_t cudaGetLastError() {
    return cudaSuccess;
}
static cudaError_t cudaSetDevice(int) {
    return cudaSuccess;
}
static cudaError_t cudaDeviceGetPCIBusId(char *out, int size, int device) {
    snprintf(out, (size_t)size, "0000:%02X:00.0", device);
    return cudaSuccess;
}
static cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = GREATEST_PRIORITY;
    return cudaSuccess;
}
static cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, int, int priority) {
    *out = new cpu_stream(true);
    return priority == GREATEST_PRIORITY ? cudaSuccess : cudaErrorNotReady;
}
static void cudaStreamDestroy(cudaStream_t stream) {
    delete stream;
}

/* ---- what comm_nccl.cu takes from cuda.cuh ---- */

struct backend_state {
    int device;
    cudaStream_t stream;
};

static enum status cuda_failed(cudaError_t, const char *what) {
    return fail("CUDA: %s", what);
}

#define CUDA_CHECK(call)                                                                                     \
    do {                                                                                                     \
        cudaError_t cuda_error_ = (call);                                                                    \
        if (cuda_error_ != cudaSuccess) {                                                                    \
            return cuda_failed(cuda_error_, #call);                                                          \
        }                                                                                                    \
    } while (0)

struct backend *cpu_gpu_create(int device, bool background) {
    struct backend *gpu = new struct backend();
    gpu->state = new backend_state{device, new cpu_stream(background)};
    return gpu;
}

void cpu_gpu_free(struct backend *gpu) {
    delete gpu->state->stream;
    delete gpu->state;
    delete gpu;
}

void cpu_gpu_run(struct backend *gpu, void (*work)(void *argument), void *argument) {
    gpu->state->stream->run([=] { work(argument); });
}

void cpu_gpu_synchronize(struct backend *gpu) {
    gpu->state->stream->synchronize();
}

/* ---- NCCL ---- */

enum ncclResult_t {
    ncclSuccess,
    ncclSystemError = 2,
    ncclInvalidArgument = 4,
    ncclInvalidUsage,
    ncclRemoteError = CPU_NCCL_REMOTE_ERROR,
    ncclInProgress
};
enum ncclDataType_t { ncclFloat32 = DTYPE_F32, ncclFloat64 = DTYPE_F64, ncclBfloat16 = DTYPE_BF16 };
enum ncclRedOp_t { ncclSum = COMM_SUM, ncclMax = COMM_MAX, ncclMin = COMM_MIN };

struct ncclUniqueId {
    char path[128];
};
struct ncclConfig_t {
    int blocking, minCTAs, maxCTAs;
};
#define NCCL_CONFIG_INITIALIZER                                                                              \
    { 1, 0, 0 }

enum { MOST_RANKS = 4, MOST_BYTES = 4 << 20, LOOKS_IN_PROGRESS = 2, LATE_US = 300, NAP_US = 50 };

/* Where ranks meet: how far each is, and what it brings. */
struct meeting_place {
    std::atomic<uint64_t> phase[MOST_RANKS];
    char brought[MOST_RANKS][MOST_BYTES];
};

struct communicator {
    int rank, ranks;
    meeting_place *place;
    uint64_t phase = 0;
    std::atomic<bool> aborted{false}, joined{false};
    std::atomic<int> unfinished{0}; /* collectives */
    std::atomic<int> looks{0};      /* until the call made last is in progress no more */

    ~communicator() {
        munmap(place, sizeof *place);
    }
    /* Until all ranks have come as far; false once aborted. */
    bool meet() {
        place->phase[rank] = ++phase;
        for (int other = 0; other < ranks; other++) {
            while (place->phase[other] < phase) {
                if (aborted) {
                    return false;
                }
                usleep(NAP_US);
            }
        }
        return !aborted;
    }
};

struct ncclComm {
    std::shared_ptr<communicator> shared; /* with its collectives, which may end later */
    std::thread joining;
};
typedef ncclComm *ncclComm_t;

static std::atomic<int> met_error{ncclSuccess};

void cpu_nccl_meets(int result) {
    met_error = result;
}

static const char *ncclGetErrorString(ncclResult_t result) {
    return result == ncclRemoteError ? "remote process exited or there was a network error" : "failed";
}
static const char *ncclGetLastError(ncclComm_t) {
    return "";
}

static ncclResult_t ncclGetUniqueId(ncclUniqueId *out) {
    int file = memfd_create("nccl_on_cpu", 0);
    if (file < 0 || ftruncate(file, sizeof(meeting_place)) != 0) {
        return ncclSystemError;
    }
    snprintf(out->path, sizeof out->path, "/proc/%d/fd/%d", (int)getpid(), file);
    return ncclSuccess;
}

static ncclResult_t ncclCommInitRankConfig(
    ncclComm_t *out, int ranks, ncclUniqueId id, int rank, ncclConfig_t *config) {
    int file = open(id.path, O_RDWR | O_CLOEXEC);
    if (config->blocking || ranks > MOST_RANKS || file < 0) {
        return ncclInvalidArgument;
    }
    void *place = mmap(NULL, sizeof(meeting_place), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (place == MAP_FAILED) {
        return ncclSystemError;
    }
    std::shared_ptr<communicator> c(new communicator{rank, ranks, (meeting_place *)place});
    *out = new ncclComm{c, std::thread([c] { c->joined = c->meet(); })};
    return ncclInProgress;
}

static ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *out) {
    communicator *c = comm->shared.get();
    bool ready = c->joined && c->looks-- <= 0;
    *out = met_error != ncclSuccess ? (ncclResult_t)(int)met_error : ready ? ncclSuccess : ncclInProgress;
    return ncclSuccess;
}

static ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    comm->joining.join();
    delete comm;
    return ncclSuccess;
}

static ncclResult_t ncclCommAbort(ncclComm_t comm) {
    comm->shared->aborted = true;
    return ncclCommDestroy(comm);
}

static ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    while (comm->shared->unfinished > 0 && !comm->shared->aborted) {
        usleep(NAP_US);
    }
    return ncclSuccess;
}

/* Each rank brings `bytes` of `from`; finish(what all brought) is called once all have. */
static ncclResult_t collective(ncclComm_t comm, cudaStream_t stream, const void *from, size_t bytes,
    std::function<void(const communicator &)> finish) {
    if (bytes > MOST_BYTES) {
        return ncclInvalidArgument;
    }
    std::shared_ptr<communicator> c = comm->shared;
    c->unfinished++;
    c->looks = LOOKS_IN_PROGRESS;
    stream->run([=] {
        memcpy(c->place->brought[c->rank], from, bytes);
        if (c->meet()) {
            usleep(LATE_US);
            finish(*c);
            c->meet(); /* nobody brings the next before all have taken this */
        }
        c->unfinished--;
    });
    return ncclInProgress;
}

/* Of elements [first, first + count) of what all brought. */
static void combine(
    const communicator &c, void *to, size_t first, size_t count, ncclDataType_t type, ncclRedOp_t op) {
    size_t size = (size_t)dtype_bytes((enum dtype)type);
    memcpy(to, c.place->brought[0] + first * size, count * size);
    for (int rank = 1; rank < c.ranks; rank++) {
        comm_combine(
            to, c.place->brought[rank] + first * size, (int64_t)count, (enum dtype)type, (enum comm_op)op);
    }
}

static ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type,
    ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    return collective(comm, stream, from, count * dtype_bytes((enum dtype)type),
        [=](const communicator &c) { combine(c, to, 0, count, type, op); });
}

static ncclResult_t ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t type,
    ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    return collective(comm, stream, from, (size_t)comm->shared->ranks * count * dtype_bytes((enum dtype)type),
        [=](const communicator &c) { combine(c, to, (size_t)c.rank * count, count, type, op); });
}

static ncclResult_t ncclAllGather(
    const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
    size_t bytes = count * dtype_bytes((enum dtype)type);
    return collective(comm, stream, from, bytes, [=](const communicator &c) {
        for (int rank = 0; rank < c.ranks; rank++) {
            memcpy((char *)to + (size_t)rank * bytes, c.place->brought[rank], bytes);
        }
    });
}

static ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t type, int root,
    ncclComm_t comm, cudaStream_t stream) {
    size_t bytes = count * dtype_bytes((enum dtype)type);
    return collective(comm, stream, from, bytes,
        [=](const communicator &c) { memmove(to, c.place->brought[root], bytes); });
}

#include "llmc/comm_nccl.cu"
