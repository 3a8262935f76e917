# make                      the trainer (./train_gpt) and the shard tool (./build/prepare)
# make config               what this machine has, and what of it the build takes
# make train                train a small GPT on this repository's own text; ARGS="--steps 50": other options for it
# make test                 everything that needs no GPU; test-unit: the tests in C alone
# make test-gpu             everything that needs one; gpu-tests: builds it, here or for another machine
# make sanitize-gpu         the same under compute-sanitizer; SANITIZED=build/test/gpu_ops: one test alone
# make bench-ops            what every op reaches on the GPU
# make bench-attention      what the attention kernels reach; ARGS="--kernel fa3 --deterministic"
# make bench-generate       how fast a 124M GPT writes
# make tune-attention       the best tiles of fa2 for this GPU; HEAD_DIMS="64 128", WRITE=1: into the source
# make attention-registers  what registers the attention kernels take; fails if a tuned one spills
# make lib                  libattention.so: the attention kernels alone, with the interface of attention/attention.h
# make fuzz                 the fuzzers, with CC=clang BUILD=build-fuzz SANITIZE=fuzzer-no-link,address,undefined
# make format               clang-format every source; format-check: only look
# make clean                remove what was built
# make help                 this text
#
# Variables: CC=clang BUILD=dir CUDA=0|1 NCCL=0|1 OPENMP=0|1 OPENBLAS=0|1 MARCH=x86-64-v3 GPU_ARCH='80 90a'
#            NVCC=path CUDA_HOME=dir NCCL_HOME=dir SANITIZE=address,undefined OPTIMIZE=-O1 JOBS=1 V=1 (whole commands)

BUILD ?= build
CC ?= cc
CUDA ?= auto
NCCL ?= auto
OPENMP ?= auto
OPENBLAS ?= auto
MARCH ?= native
GPU_ARCH ?=
OPTIMIZE ?= -O3
SANITIZE ?=
NVCC ?= $(firstword $(wildcard $(CUDA_HOME)/bin/nvcc) $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc))

# as many commands at once as there are processors; JOBS=1 for one after the other
JOBS ?= $(shell nproc 2>/dev/null || echo 1)
MAKEFLAGS += -j$(JOBS)

# ---- what this machine has ---------------------------------------------------------------------------------

HASH := \#
# $(call compiles,flags,program): "yes" if the C compiler accepts and links it (third: libraries)
compiles = $(shell printf '%b' '$(2)' | $(CC) $(1) -x c - -o /dev/null $(3) >/dev/null 2>&1 && echo yes)
# $(call wanted,variable,found): auto takes what was found, 0 and 1 are the user's word
wanted = $(if $(filter auto,$($(1))),$(2),$(if $(filter 1 yes,$($(1))),yes))

HAVE_NVCC := $(call wanted,CUDA,$(if $(NVCC),yes))
HAVE_MARCH := $(call compiles,-march=$(MARCH),int main(void){return 0;})
HAVE_OPENMP := $(call wanted,OPENMP,$(call compiles,-fopenmp,$(HASH)include <omp.h>\nint main(void){return omp_get_max_threads()<0;}))
BLAS_CFLAGS := $(shell pkg-config --cflags openblas 2>/dev/null)
BLAS_LIBS := $(or $(shell pkg-config --libs openblas 2>/dev/null),-lopenblas)
HAVE_OPENBLAS := $(call wanted,OPENBLAS,$(call compiles,$(BLAS_CFLAGS),$(HASH)include <cblas.h>\nint main(void){openblas_set_num_threads(1);return 0;},$(BLAS_LIBS)))

ifeq ($(HAVE_NVCC),yes)
CUDA_ROOT := $(patsubst %/bin/,%,$(dir $(realpath $(NVCC))))
PYTHON_NCCL := $(firstword $(wildcard $(shell python3 -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' 2>/dev/null)/nvidia/nccl))
NCCL_INCLUDE := $(firstword $(dir $(wildcard $(NCCL_HOME)/include/nccl.h $(CUDA_ROOT)/include/nccl.h /usr/include/nccl.h $(PYTHON_NCCL)/include/nccl.h)))
NCCL_LIBRARY := $(firstword $(wildcard $(NCCL_HOME)/lib/libnccl.so* $(CUDA_ROOT)/lib64/libnccl.so* /usr/lib/*/libnccl.so* $(PYTHON_NCCL)/lib/libnccl.so*))
HAVE_NCCL := $(call wanted,NCCL,$(if $(NCCL_INCLUDE),$(if $(NCCL_LIBRARY),yes)))
# the GPU that is there, else the two generations that the kernels are written for
FOUND_ARCH := $(subst .,,$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | sort -u))
GPU_ARCHS := $(patsubst 90,90a,$(or $(GPU_ARCH),$(FOUND_ARCH),80 90a))
endif

# ---- flags -------------------------------------------------------------------------------------------------

WARNINGS := -Wall -Wextra -Wshadow -Wvla -Wno-unknown-pragmas
CPPFLAGS += -I. -D_GNU_SOURCE
CFLAGS += -std=c11 $(OPTIMIZE) -g $(WARNINGS) -fno-math-errno -fPIC
LDLIBS += -lm -lpthread
ifeq ($(HAVE_MARCH),yes)
CFLAGS += -march=$(MARCH)
endif
ifeq ($(HAVE_OPENMP),yes)
CFLAGS += -fopenmp
LDFLAGS += -fopenmp
endif
ifeq ($(HAVE_OPENBLAS),yes)
CPPFLAGS += -DWITH_OPENBLAS $(BLAS_CFLAGS)
LDLIBS += $(BLAS_LIBS)
endif
ifneq ($(SANITIZE),)
CFLAGS += -fsanitize=$(SANITIZE) -fno-omit-frame-pointer -fno-sanitize-recover=all
LDFLAGS += -fsanitize=$(SANITIZE)
endif
ifeq ($(HAVE_NVCC),yes)
CPPFLAGS += -DWITH_CUDA
NVCCFLAGS += -std=c++17 -O3 -lineinfo --threads 2 $(foreach a,$(GPU_ARCHS),-gencode arch=compute_$(a),code=sm_$(a))
NVCCFLAGS += -Xcompiler -fPIC,-Wall,-Wno-unknown-pragmas
CUDA_LIBS += -lcublas -lcublasLt
ifeq ($(HAVE_NCCL),yes)
CPPFLAGS += -DWITH_NCCL -I$(NCCL_INCLUDE)
CUDA_LIBS += $(NCCL_LIBRARY) -Xlinker -rpath -Xlinker $(dir $(NCCL_LIBRARY))
endif
LINK = $(NVCC) $(foreach a,$(GPU_ARCHS),-gencode arch=compute_$(a),code=sm_$(a)) $(addprefix -Xcompiler ,$(LDFLAGS)) $^ -o $@ $(LDLIBS) $(CUDA_LIBS)
else
LINK = $(CC) $(LDFLAGS) $^ -o $@ $(LDLIBS)
endif

# ---- sources -----------------------------------------------------------------------------------------------

HOST_OBJECTS := $(patsubst %.c,$(BUILD)/%.o,$(wildcard llmc/*.c) $(wildcard attention/*.c) $(filter-out data/prepare.c,$(wildcard data/*.c)))
CPU_OBJECTS := $(foreach p,f32 f64,$(patsubst %.c,$(BUILD)/%.$(p).o,$(wildcard llmc/cpu/*.c)))
ifeq ($(HAVE_NVCC),yes)
ATTENTION_OBJECTS := $(patsubst %.cu,$(BUILD)/%.o,$(filter-out attention/bench.cu,$(wildcard attention/*.cu)))
CUDA_OBJECTS := $(patsubst %.cu,$(BUILD)/%.o,$(wildcard llmc/*.cu) $(wildcard llmc/cuda/*.cu)) $(ATTENTION_OBJECTS)
endif
OBJECTS := $(HOST_OBJECTS) $(CPU_OBJECTS) $(CUDA_OBJECTS)
TESTS := $(patsubst test/%.c,$(BUILD)/test/%,$(wildcard test/test_*.c))
TEST_SCRIPTS := $(wildcard test/test_*.sh)
GPU_TESTS := $(addprefix $(BUILD)/,$(basename $(wildcard test/gpu_*.c test/gpu_*.cu)))
GPU_TEST_SCRIPTS := $(wildcard test/gpu_*.sh)
FUZZERS := $(patsubst test/%.c,$(BUILD)/test/%,$(wildcard test/fuzz_*.c))

# Commands are shown in short; V=1 shows them whole.
ifeq ($(V),)
say = @printf '  %-5s %s\n' '$(1)' '$(2)';
endif

.PHONY: all train lib test test-unit gpu-tests test-gpu sanitize-gpu bench-ops bench-generate bench-attention \
    tune-attention attention-registers fuzz format format-check config help clean
.DELETE_ON_ERROR:
.SECONDARY:
all: config train_gpt $(BUILD)/prepare

config:
	@echo "flashgpt builds with"
	@echo "  compiler   $(CC) $(shell $(CC) -dumpversion) $(if $(HAVE_MARCH),-march=$(MARCH)) $(OPTIMIZE)$(if $(SANITIZE), -fsanitize=$(SANITIZE))"
	@echo "  CUDA       $(if $(HAVE_NVCC),$(NVCC) for sm_$(subst $() ,$() sm_,$(strip $(GPU_ARCHS))),none: trains on the CPU)"
	@echo "  NCCL       $(if $(HAVE_NCCL),$(NCCL_LIBRARY),none: one GPU)"
	@echo "  OpenMP     $(if $(HAVE_OPENMP),yes,none: one CPU thread a rank)"
	@echo "  OpenBLAS   $(if $(HAVE_OPENBLAS),$(BLAS_LIBS),none: own matrix products)"

# Everything depends on the flags it was compiled with.
FLAGS_STAMP := $(BUILD)/flags
FLAGS_NOW := $(CC) $(CPPFLAGS) $(CFLAGS) $(LDFLAGS) $(LDLIBS) $(if $(HAVE_NVCC),$(NVCC) $(NVCCFLAGS) $(CUDA_LIBS))
ifneq ($(FLAGS_NOW),$(shell cat $(FLAGS_STAMP) 2>/dev/null))
.PHONY: $(FLAGS_STAMP)
endif
$(FLAGS_STAMP):
	@mkdir -p $(@D)
	@printf '%s' '$(FLAGS_NOW)' > $@

$(BUILD)/%.o: %.c $(FLAGS_STAMP)
	@mkdir -p $(@D)
	$(call say,cc,$<)$(CC) $(CPPFLAGS) $(CFLAGS) -MMD -MP -c $< -o $@

$(BUILD)/llmc/cpu/%.f32.o: llmc/cpu/%.c $(FLAGS_STAMP)
	@mkdir -p $(@D)
	$(call say,cc,$<)$(CC) $(CPPFLAGS) $(CFLAGS) -MMD -MP -c $< -o $@

$(BUILD)/llmc/cpu/%.f64.o: llmc/cpu/%.c $(FLAGS_STAMP)
	@mkdir -p $(@D)
	$(call say,cc,$< in double)$(CC) $(CPPFLAGS) $(CFLAGS) -DCPU_F64 -MMD -MP -c $< -o $@

ifeq ($(HAVE_NVCC),yes)
# what ptxas says of registers stays beside the object, for scripts/attention_registers.sh; the rest is shown
$(BUILD)/attention/%.o: attention/%.cu $(FLAGS_STAMP)
	@mkdir -p $(@D)
	$(call say,nvcc,$<)$(NVCC) $(CPPFLAGS) $(NVCCFLAGS) -Xptxas -v -MMD -MP -c $< -o $@ 2>$(@:.o=.ptxas); \
	    status=$$?; grep -v 'ptxas info\|bytes stack frame\|^$$' $(@:.o=.ptxas) >&2; exit $$status

$(BUILD)/%.o: %.cu $(FLAGS_STAMP)
	@mkdir -p $(@D)
	$(call say,nvcc,$<)$(NVCC) $(CPPFLAGS) $(NVCCFLAGS) -MMD -MP -c $< -o $@
else
$(BUILD)/train_gpt.o: train_gpt.cu $(FLAGS_STAMP)
	@mkdir -p $(@D)
	$(call say,cc,$<)$(CC) $(CPPFLAGS) $(CFLAGS) -MMD -MP -x c -c $< -o $@
endif

$(BUILD)/train_gpt: $(BUILD)/train_gpt.o $(OBJECTS)
	$(call say,link,$@)$(LINK)

# the program where people look for it: a copy of the last build's
.PHONY: train_gpt
train_gpt: $(BUILD)/train_gpt
	@cmp -s $< $@ || cp -f $< $@

$(BUILD)/prepare: $(BUILD)/data/prepare.o $(OBJECTS)
	$(call say,link,$@)$(LINK)

$(BUILD)/test/%: $(BUILD)/test/%.o $(OBJECTS)
	$(call say,link,$@)$(LINK)

$(BUILD)/attention/bench: $(BUILD)/attention/bench.o $(OBJECTS)
	$(call say,link,$@)$(LINK)

# the attention kernels with the interface of attention/attention.h, and nothing of the trainer
$(BUILD)/libattention.so: $(patsubst %.c,$(BUILD)/%.o,$(wildcard attention/*.c) llmc/common.c) $(ATTENTION_OBJECTS) attention/exports.map
	$(call say,link,$@)$(if $(HAVE_NVCC),$(NVCC) $(addprefix -Xcompiler ,$(LDFLAGS)),$(CC) $(LDFLAGS)) -shared \
	    -Xlinker --version-script=attention/exports.map $(filter %.o,$^) -o $@ -lm $(if $(HAVE_NVCC),-lcublas)
lib: $(BUILD)/libattention.so
	@cmp -s $< libattention.so || cp -f $< libattention.so

-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)

# ---- jobs --------------------------------------------------------------------------------------------------

train: all
	@FLASHGPT_BUILD=$(BUILD) scripts/train_on_own_text.sh $(ARGS)

test: all $(TESTS)
	@test/run_tests.sh $(BUILD) $(TESTS) $(TEST_SCRIPTS)

# the C tests alone: what the sanitizer builds run
test-unit: $(BUILD)/train_gpt $(TESTS)
	@test/run_tests.sh $(BUILD) $(TESTS)

ifeq ($(HAVE_NVCC),yes)
gpu-tests: $(GPU_TESTS) $(BUILD)/test/bench_ops $(BUILD)/test/bench_generate $(BUILD)/attention/bench
test-gpu: all $(GPU_TESTS)
	@test/run_tests.sh $(BUILD) $(GPU_TESTS) $(GPU_TEST_SCRIPTS)

# one test alone: make sanitize-gpu SANITIZED=build/test/gpu_ops
SANITIZED ?= $(GPU_TESTS)
sanitize-gpu: $(SANITIZED)
	@scripts/sanitize_gpu.sh $(SANITIZED)

# what the kernels reach on the GPU that is there
bench-ops: $(BUILD)/test/bench_ops
	$<
bench-generate: $(BUILD)/test/bench_generate
	$<
bench-attention: $(BUILD)/attention/bench
	$< $(ARGS)
# the best tiles of fa2 for the GPU that is there: make tune-attention [HEAD_DIMS="64 128"] [WRITE=1]
tune-attention: $(BUILD)/attention/bench
	@NVCC='$(NVCC)' scripts/tune_attention.sh $(BUILD) "$(WRITE)" $(or $(HEAD_DIMS),64 80 96 128 192 256)
# registers and spills of every attention kernel; a spill in a tuned one fails
attention-registers: $(ATTENTION_OBJECTS)
	@scripts/attention_registers.sh $(BUILD)
else
gpu-tests test-gpu sanitize-gpu bench-ops bench-generate bench-attention tune-attention attention-registers:
	@echo "make $@ needs CUDA, which this build does without; make config says what was found" >&2; exit 1
endif

# libFuzzer harnesses (clang): make fuzz CC=clang BUILD=build-fuzz SANITIZE=fuzzer-no-link,address,undefined
ifneq ($(findstring fuzzer,$(SANITIZE)),)
fuzz: LDFLAGS += -fsanitize=fuzzer
fuzz: $(FUZZERS)
else
fuzz:
	@echo "make fuzz needs: make fuzz CC=clang BUILD=build-fuzz SANITIZE=fuzzer-no-link,address,undefined" >&2; exit 1
endif

FORMATTED = $(or $(shell git ls-files '*.c' '*.h' '*.cu' '*.cuh'),$(error make $@ looks at the files that git knows, and finds none))
format:
	clang-format -i $(FORMATTED)
format-check:
	clang-format --dry-run -Werror $(FORMATTED)

clean:
	rm -rf $(BUILD) train_gpt libattention.so

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile
