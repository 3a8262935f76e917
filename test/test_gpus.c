/* GPUs are found by the names that drivers give, and no other chip is taken for one of them; peaks are the datasheets'. */
#include "llmc/gpus.h"
#include "test.h"

static void test_gpus_are_found_by_the_names_that_drivers_give(void) {
    static const struct {
        const char *device_name, *key;
    } cases[] = {
        {"NVIDIA A100-SXM4-40GB", "a100-40gb"},
        {"A100-SXM4-40GB", "a100-40gb"},
        {"NVIDIA A100-PCIE-40GB", "a100-40gb"},
        {"NVIDIA A100-SXM4-80GB", "a100-80gb"},
        {"NVIDIA A100 80GB PCIe", "a100-80gb"},
        {"NVIDIA H100 80GB HBM3", "h100-sxm"},
        {"NVIDIA H100 PCIe", "h100-pcie"},
        {"NVIDIA H100 NVL", "h100-nvl"},
        {"NVIDIA H200", "h200"},
        {"NVIDIA H200 NVL", "h200-nvl"},
        {"NVIDIA GH200 480GB", "gh200-96gb"},
        {"NVIDIA B200", "b200"},
        {"NVIDIA GB200", "gb200"},
        {"NVIDIA L4", "l4"},
        {"NVIDIA L40", "l40"},
        {"NVIDIA L40S", "l40s"},
        {"NVIDIA A10", "a10"},
        {"NVIDIA A10G", "a10g"},
        {"NVIDIA A40", "a40"},
        {"NVIDIA A30", "a30"},
        {"NVIDIA RTX A6000", "rtx-a6000"},
        {"NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"},
        {"NVIDIA GeForce RTX 3090", "rtx-3090"},
        {"NVIDIA GeForce RTX 3090 Ti", "rtx-3090-ti"},
        {"NVIDIA GeForce RTX 4090", "rtx-4090"},
        {"NVIDIA GeForce RTX 5090", "rtx-5090"},
        {"NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"},
        /* not the chips that they are named after */
        {"NVIDIA RTX A1000", NULL},
        {"NVIDIA GeForce RTX 4090 Laptop GPU", NULL},
        {"NVIDIA GeForce RTX 4090 D", NULL},
        {"NVIDIA GeForce RTX 3080 Ti", NULL},
        {"NVIDIA GeForce RTX 4080 SUPER", NULL},
        {"NVIDIA A100-SXM4-40GB MIG 1g.5gb", NULL},
        {"NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", NULL},
        /* no bf16 */
        {"Tesla V100-SXM2-32GB", NULL},
        {"Tesla T4", NULL},
        {"", NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const struct gpu_info *gpu = gpu_find_device(cases[i].device_name);
        EXPECT_STRING(gpu == NULL ? "none" : gpu->key, cases[i].key == NULL ? "none" : cases[i].key);
    }
}

static void test_gpu_peaks_are_dense_and_accumulate_in_fp32(void) {
    static const struct {
        const char *key;
        double tflops;
    } datasheets[] = {{"a100-40gb", 312}, {"a100-80gb", 312}, {"h100-sxm", 989}, {"h100-pcie", 756},
        {"h200", 989}, {"b200", 2250}, {"l4", 121}, {"l40", 181}, {"l40s", 362}, {"a10", 125}, {"a30", 165},
        {"rtx-3090", 71}, {"rtx-4090", 165}, {"rtx-5090", 209}, {"rtx-a6000", 155}, {"rtx-6000-ada", 364},
        {"a40", 150}};
    for (size_t i = 0; i < sizeof datasheets / sizeof datasheets[0]; i++) {
        const struct gpu_info *gpu = gpu_find_key(datasheets[i].key);
        EXPECT(gpu != NULL && fabs(gpu->bf16_tflops - datasheets[i].tflops) < 1);
    }
    EXPECT(gpu_find_key("h100") == NULL && gpu_find_key("") == NULL);
}

static void test_the_gpu_table_holds_together(void) {
    int count;
    const struct gpu_info *gpus = gpu_table(&count);
    EXPECT(count > 30);
    for (int i = 0; i < count; i++) {
        EXPECT(gpu_find_key(gpus[i].key) == &gpus[i]);            /* keys are unique */
        EXPECT(gpu_find_device(gpus[i].device_name) == &gpus[i]); /* names are not each other's */
        EXPECT(gpus[i].memory_gib > 8 && gpus[i].memory_gib < 300);
        EXPECT(strncmp(gpus[i].architecture, "sm_", 3) == 0);
    }
}

static void test_peaks_from_the_clock_agree_with_the_datasheets(void) {
    EXPECT_NEAR(gpu_peak_from_clock(8, 0, 108, 1.410), 312, 1);    /* A100 */
    EXPECT_NEAR(gpu_peak_from_clock(8, 6, 84, 1.800), 154.8, 1);   /* RTX A6000 */
    EXPECT_NEAR(gpu_peak_from_clock(8, 9, 142, 2.505), 364, 1);    /* RTX 6000 Ada */
    EXPECT_NEAR(gpu_peak_from_clock(9, 0, 132, 1.830), 989, 1);    /* H100 SXM */
    EXPECT_NEAR(gpu_peak_from_clock(10, 0, 148, 1.850), 2250, 10); /* B200 */
    EXPECT(gpu_peak_from_clock(7, 0, 80, 1.53) == 0);              /* V100: no bf16 */
    EXPECT(gpu_peak_from_clock(42, 0, 100, 2.0) == 0);
}

int main(void) {
    RUN(test_gpus_are_found_by_the_names_that_drivers_give);
    RUN(test_gpu_peaks_are_dense_and_accumulate_in_fp32);
    RUN(test_the_gpu_table_holds_together);
    RUN(test_peaks_from_the_clock_agree_with_the_datasheets);
    return test_summary();
}
