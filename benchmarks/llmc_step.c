/* In: sizes, a model file, a token file (arguments); numbers of steps (stdin). Out: mean seconds of a training step.
   Does not contain code of llm.c: a generated source file includes llm.c's train_gpt2.c (TESTING leaves out its main)
   before this file. llm.c's Makefile builds it with llm.c's flags. Hyper-parameters are those of peer_step.py. */

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + 1e-9 * now.tv_nsec;
}

int main(int argc, char **argv) {
    if (argc != 6) {
        fprintf(stderr, "usage: %s MODEL TOKENS BATCH_SIZE SEQ_LEN WARMUP\n", argv[0]);
        return 2;
    }
    int batch_size = atoi(argv[3]), seq_len = atoi(argv[4]), num_warmup = atoi(argv[5]);
    GPT2 model;
    gpt2_build_from_checkpoint(&model, argv[1]);
    DataLoader loader;
    dataloader_init(&loader, argv[2], batch_size, seq_len, 0, 1, 1);

    int num_steps = num_warmup, taken = 0, ready = 0;
    for (;;) {
        double begun = now_s();
        for (int i = 0; i < num_steps; i++) {
            dataloader_next_batch(&loader);
            gpt2_forward(&model, loader.inputs, loader.targets, batch_size, seq_len);
            gpt2_zero_grad(&model);
            gpt2_backward(&model);
            gpt2_update(&model, 6e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, ++taken);
        }
        if (ready) printf("benchmark: %.6f", (now_s() - begun) / num_steps);
        if (!ready) printf("\nbenchmark: ready");
        ready = 1;
        printf("\n");
        fflush(stdout);
        if (scanf("%d", &num_steps) != 1) break;
    }
    return 0;
}
