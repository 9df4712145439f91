//! A team of threads for work in phases of microseconds.
//!
//! The caller is member 0; the others wait for it. Whoever waits spins first, for the
//! wait is mostly shorter than a system call; then it yields, so that a machine with
//! more threads than cores goes on; between jobs it parks after a while, so that an idle
//! team costs nothing.

use std::hint::spin_loop;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

const SPINS: u32 = 4000;
const YIELDING: Duration = Duration::from_millis(2);

/// What every member runs, with its index.
type Job<'a> = &'a (dyn Fn(usize) + Sync + 'a);

/// A number alone on its cache line: its neighbours' writes do not disturb who watches it.
#[repr(align(128))]
#[derive(Default)]
struct CachePadded(AtomicUsize);

/// Where a fixed number of threads wait for one another, again and again.
pub struct Barrier {
    parties: usize,
    arrived: CachePadded,
    generation: CachePadded,
}

impl Barrier {
    /// For so many threads.
    pub fn new(parties: usize) -> Self {
        Self {
            parties,
            arrived: CachePadded::default(),
            generation: CachePadded::default(),
        }
    }

    /// Return when all have come; what each wrote before, all see.
    pub fn wait(&self) {
        if self.parties == 1 {
            return;
        }
        let generation = self.generation.0.load(Ordering::Acquire);
        if self.arrived.0.fetch_add(1, Ordering::AcqRel) + 1 == self.parties {
            self.arrived.0.store(0, Ordering::Relaxed);
            self.generation.0.store(generation + 1, Ordering::Release);
            return;
        }
        let passed = || self.generation.0.load(Ordering::Acquire) != generation;
        if !spin_until(passed) {
            while !passed() {
                thread::yield_now();
            }
        }
    }
}

/// Spin for a while; whether `ready` came true.
fn spin_until(ready: impl Fn() -> bool) -> bool {
    for _ in 0..SPINS {
        if ready() {
            return true;
        }
        spin_loop();
    }
    false
}

/// What the members share: which job it is, and the job.
struct Board {
    number: CachePadded,
    /// Points to a `Job` on the caller's stack while one runs; null tells members to end.
    job: AtomicPtr<Job<'static>>,
    done: Barrier,
}

/// Threads that run one job at a time together; they end with it.
pub struct Team {
    board: Arc<Board>,
    members: Vec<JoinHandle<()>>,
}

impl Team {
    /// A team of `size`, the calling thread included; at least 1.
    pub fn new(size: usize) -> Self {
        let board = Arc::new(Board {
            number: CachePadded::default(),
            job: AtomicPtr::default(),
            done: Barrier::new(size.max(1)),
        });
        let members = (1..size)
            .map(|index| {
                let board = Arc::clone(&board);
                thread::Builder::new()
                    .name(format!("tasuki-cpu-{index}"))
                    .spawn(move || serve(&board, index))
                    .expect("the system has a thread for us")
            })
            .collect();
        Self { board, members }
    }

    /// How many they are, the caller included.
    pub fn size(&self) -> usize {
        self.members.len() + 1
    }

    /// Run `job` on every member, and return when all are done.
    pub fn run(&mut self, job: Job<'_>) {
        let guard = AbortOnPanic;
        if !self.members.is_empty() {
            // SAFETY: only the lifetime changes; nobody uses it after `done`, which we await.
            let mut job: Job<'static> = unsafe { std::mem::transmute(job) };
            self.post(&raw mut job);
            job(0);
            self.board.done.wait();
        } else {
            job(0);
        }
        std::mem::forget(guard);
    }

    fn post(&self, job: *mut Job<'static>) {
        self.board.job.store(job, Ordering::Relaxed);
        self.board.number.0.fetch_add(1, Ordering::Release);
        for member in &self.members {
            member.thread().unpark(); // costs next to nothing where it is not parked
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.post(std::ptr::null_mut());
        for member in self.members.drain(..) {
            let _ = member.join();
        }
    }
}

/// The life of a member: wait for a job, run it, meet the others.
fn serve(board: &Board, index: usize) {
    let mut last = 0;
    loop {
        let posted = || board.number.0.load(Ordering::Acquire) != last;
        if !spin_until(posted) {
            let begin = Instant::now();
            while !posted() {
                if begin.elapsed() < YIELDING {
                    thread::yield_now();
                } else {
                    thread::park();
                }
            }
        }
        last += 1;
        let job = board.job.load(Ordering::Relaxed);
        if job.is_null() {
            return;
        }
        let guard = AbortOnPanic;
        // SAFETY: `run` keeps the job until all members have met below.
        unsafe { (*job)(index) };
        std::mem::forget(guard);
        board.done.wait();
    }
}

/// A member that is gone would let the others wait for ever: the process ends instead.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        std::process::abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    fn meet_often(size: usize, phases: usize) {
        let mut team = Team::new(size);
        let barrier = Barrier::new(size);
        let counts: Vec<AtomicUsize> = (0..phases).map(|_| AtomicUsize::new(0)).collect();
        for job in 1..=3 {
            team.run(&|_| {
                for count in &counts {
                    count.fetch_add(1, Ordering::Relaxed);
                    barrier.wait();
                    assert_eq!(count.load(Ordering::Relaxed), job * size);
                    barrier.wait();
                }
            });
        }
    }

    #[test]
    fn nobody_passes_a_barrier_before_all_have_come() {
        for size in [1, 2, 3] {
            meet_often(size, 200);
        }
    }

    #[test]
    fn more_threads_than_cores_finish() {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        meet_often(4 * cores, 20);
    }

    #[test]
    fn every_member_runs_every_job_also_after_it_was_parked() {
        let mut team = Team::new(3);
        assert_eq!(team.size(), 3);
        for _ in 0..3 {
            let seen = Mutex::new(Vec::new());
            team.run(&|index| seen.lock().expect("no panic").push(index));
            let mut seen = seen.into_inner().expect("no panic");
            seen.sort_unstable();
            assert_eq!(seen, [0, 1, 2]);
            thread::sleep(4 * YIELDING);
        }
    }
}
