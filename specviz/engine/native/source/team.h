/* A few threads that run one function together and wait for each other in between. It knows nothing of what they compute.

   Threads are made when first asked for and sleep between calls. A process that was forked makes its own. */
#ifndef SPECVIZ_TEAM_H
#define SPECVIZ_TEAM_H

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <unistd.h>

#define MOST_WORKERS 64
#define SPINS 1000                   /* looks before the processor is offered to others: some ten microseconds */

typedef void (*Job)(void *data, int worker, int num_workers);

static struct {
    pthread_mutex_t busy, lock;      /* busy: held by the call that has the team */
    pthread_cond_t wake;
    pid_t owner;
    int num_threads;                 /* besides the caller */
    int first_round[MOST_WORKERS];   /* the round before the first one of each thread */
    atomic_int round, finished, arrived, phase;
    int num_workers;
    Job job;
    void *data;
} team = {.busy = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

static void relax(int spins) {
    if (spins > SPINS) sched_yield();
#if defined(__x86_64__)
    else __builtin_ia32_pause();
#endif
}

/* Wait until all workers of the running job are here. */
static void meet(int num_workers) {
    if (num_workers == 1) return;
    const int phase = atomic_load(&team.phase);
    if (atomic_fetch_add(&team.arrived, 1) + 1 == num_workers) {
        atomic_store(&team.arrived, 0);
        atomic_store(&team.phase, phase + 1);
        return;
    }
    for (int spins = 0; atomic_load(&team.phase) == phase; spins++) relax(spins);
}

static void *serve(void *number) {
    const int worker = (int)(intptr_t)number;
    int seen = team.first_round[worker];
    for (;;) {
        for (int spins = 0; spins < SPINS && atomic_load(&team.round) == seen; spins++) relax(0);
        if (atomic_load(&team.round) == seen) {
            pthread_mutex_lock(&team.lock);
            while (atomic_load(&team.round) == seen) pthread_cond_wait(&team.wake, &team.lock);
            pthread_mutex_unlock(&team.lock);
        }
        seen = atomic_load(&team.round);
        if (worker < team.num_workers) team.job(team.data, worker, team.num_workers);
        atomic_fetch_add(&team.finished, 1);
    }
    return NULL;
}

/* Run job(data, worker, n) in n threads, the caller's among them; n may turn out smaller than asked for. */
static void together(Job job, void *data, int num_workers) {
    if (num_workers > MOST_WORKERS) num_workers = MOST_WORKERS;
    if (num_workers <= 1) {
        job(data, 0, 1);
        return;
    }
    pthread_mutex_lock(&team.busy);
    if (team.owner != getpid()) {    /* first call, or a child that has none of its parent's threads */
        team.owner = getpid();
        team.num_threads = 0;
        pthread_mutex_init(&team.lock, NULL);
        pthread_cond_init(&team.wake, NULL);
    }
    while (team.num_threads < num_workers - 1) {
        pthread_t thread;
        team.first_round[team.num_threads + 1] = atomic_load(&team.round);
        if (pthread_create(&thread, NULL, serve, (void *)(intptr_t)(team.num_threads + 1))) break;
        pthread_detach(thread);
        team.num_threads++;
    }
    team.num_workers = num_workers < team.num_threads + 1 ? num_workers : team.num_threads + 1;
    team.job = job, team.data = data;
    atomic_store(&team.finished, 0);
    atomic_store(&team.arrived, 0);
    pthread_mutex_lock(&team.lock);
    atomic_fetch_add(&team.round, 1);
    pthread_cond_broadcast(&team.wake);
    pthread_mutex_unlock(&team.lock);
    job(data, 0, team.num_workers);
    for (int spins = 0; atomic_load(&team.finished) < team.num_threads; spins++) relax(spins);
    pthread_mutex_unlock(&team.busy);
}

#endif
