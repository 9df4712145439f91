//! Keeps new work away from a worker that fails one request after another.
//!
//! ```text
//!           FAILURES_IN_A_ROW                  the pause is over
//!  closed ────────────────────▶ open ───────────────────────────▶ half open
//!     ▲                           ▲  a pause twice as long            │ one leg: the trial
//!     │                           └──────────────── it fails ─────────┤
//!     └─────────────────────────────────────────── it succeeds ───────┘
//! ```
//!
//! Each kind of failure is counted by itself. A trial that only computes says nothing of transfers.
//! Where no transfer is asked for any more, it closes their breaker all the same, half a minute
//! after the pause: until then the worker gets one request at a time. Times are those of the
//! worker's reports.

use std::time::Duration;

use tasuki_core::FailureKind;

/// So many failures of a kind, without a success between them, open the breaker.
const FAILURES_IN_A_ROW: u32 = 3;
/// Failures further apart are not in a row.
const WINDOW: Duration = Duration::from_secs(30);
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// The kinds of failure that a worker may be at fault for.
const KINDS: [FailureKind; 3] = [
    FailureKind::Device,
    FailureKind::Memory,
    FailureKind::Transport,
];
/// Of these.
const TRANSPORT: usize = 2;
/// Those that a worker which computes does not have.
const COMPUTING: [FailureKind; 2] = [FailureKind::Device, FailureKind::Memory];

/// What a leg has shown of its worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shown {
    /// It computes.
    Computes,
    /// It computes, and its KV moves.
    HandsOver,
    Fails(FailureKind),
    Nothing,
}

/// The breakers of one worker.
#[derive(Debug, Default)]
pub struct Breakers {
    kinds: [Breaker; KINDS.len()],
    /// Number of the leg that shows whether an open breaker closes.
    trial: Option<u64>,
    last_failure: Duration,
}

#[derive(Debug, Clone, Copy, Default)]
struct Breaker {
    in_a_row: u32,
    since: Duration,
    /// Open; half open from then on.
    until: Option<Duration>,
    /// Since it was last closed.
    openings: u32,
    total_openings: u64,
}

impl Breakers {
    /// Whether the worker may get a leg now.
    pub fn take_work(&self, now: Duration) -> bool {
        let mut open = self.kinds.iter().filter_map(|breaker| breaker.until);
        match self.trial {
            Some(_) => open.next().is_none(),
            None => open.all(|until| until <= now),
        }
    }

    /// A leg is sent to the worker. If a breaker is open, this one shows whether it closes.
    pub fn on_dispatched(&mut self, leg: u64) {
        if self.kinds.iter().any(|breaker| breaker.until.is_some()) {
            self.trial.get_or_insert(leg);
        }
    }

    /// A leg has ended, or has output for the first time.
    pub fn on_shown(&mut self, leg: u64, shown: Shown, now: Duration) {
        let is_trial = self.trial == Some(leg);
        match shown {
            Shown::Fails(kind) => self.on_failure(kind, is_trial, now),
            Shown::Computes => self.on_success(&COMPUTING, is_trial, now),
            Shown::HandsOver => self.on_success(&KINDS, is_trial, now),
            Shown::Nothing => {}
        }
        if is_trial {
            self.trial = None;
        }
    }

    /// Another worker has got this one's KV.
    pub fn on_kv_taken(&mut self) {
        self.kinds[TRANSPORT].close();
    }

    /// Another worker could not get this one's KV. The leg that computed it may have ended: where
    /// the breaker is half open, it was the trial.
    pub fn on_kv_missed(&mut self, now: Duration) {
        let until = self.kinds[TRANSPORT].until;
        let half_open = until.is_some_and(|until| until <= now);
        self.on_failure(FailureKind::Transport, half_open, now);
    }

    /// The connection is over. `had_legs`: a worker that is lost with requests has failed.
    pub fn on_lost(&mut self, had_legs: bool, now: Duration) {
        if had_legs {
            self.on_failure(FailureKind::Device, self.trial.is_some(), now);
        }
        self.trial = None;
    }

    /// Whether the leg is the one whose output is waited for.
    pub fn is_trial(&self, leg: u64) -> bool {
        self.trial == Some(leg)
    }

    /// When the worker last failed a request.
    pub fn last_failure(&self) -> Duration {
        self.last_failure
    }

    /// Of each kind: whether its breaker is open or half open, and how often it has opened.
    pub fn read(&self) -> impl Iterator<Item = (FailureKind, bool, u64)> + '_ {
        let breakers = KINDS.into_iter().zip(&self.kinds);
        breakers.map(|(kind, breaker)| (kind, breaker.until.is_some(), breaker.total_openings))
    }

    fn on_failure(&mut self, kind: FailureKind, is_trial: bool, now: Duration) {
        let Some(at) = KINDS.iter().position(|&known| known == kind) else {
            return;
        };
        self.last_failure = now;
        let breaker = &mut self.kinds[at];
        if breaker.until.is_some() {
            // Other legs than the trial were sent before it opened.
            if is_trial {
                breaker.open(now);
            }
            return;
        }
        if breaker.in_a_row == 0 || now.saturating_sub(breaker.since) > WINDOW {
            breaker.in_a_row = 0;
            breaker.since = now;
        }
        breaker.in_a_row += 1;
        if breaker.in_a_row >= FAILURES_IN_A_ROW {
            breaker.open(now);
        }
    }

    fn on_success(&mut self, kinds: &[FailureKind], is_trial: bool, now: Duration) {
        let long_ago = |until| now.saturating_sub(until) > WINDOW;
        for (kind, breaker) in KINDS.into_iter().zip(&mut self.kinds) {
            if !kinds.contains(&kind) && !breaker.until.is_some_and(long_ago) {
                continue;
            }
            breaker.in_a_row = 0;
            if is_trial {
                breaker.close();
            }
        }
    }
}

impl Breaker {
    fn open(&mut self, now: Duration) {
        let pause = FIRST_PAUSE * 2u32.pow(self.openings.min(10));
        self.until = Some(now + pause.min(LONGEST_PAUSE));
        self.openings += 1;
        self.total_openings += 1;
        self.in_a_row = 0;
    }

    fn close(&mut self) {
        self.in_a_row = 0;
        self.until = None;
        self.openings = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICE: Shown = Shown::Fails(FailureKind::Device);

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// Sends legs that show these things, all at one moment.
    fn show(breakers: &mut Breakers, shown: &[Shown], now: Duration) {
        for &each in shown {
            breakers.on_dispatched(7);
            breakers.on_shown(7, each, now);
        }
    }

    #[test]
    fn failures_in_a_row_open_and_others_do_not() {
        use FailureKind as F;
        let transport = Shown::Fails(F::Transport);
        let client = Shown::Fails(F::Client);
        let cases: [(&[Shown], bool); 7] = [
            (&[DEVICE; 2], false),
            (&[DEVICE; 3], true),
            (&[DEVICE, DEVICE, Shown::Computes, DEVICE], false),
            (&[DEVICE, DEVICE, Shown::Nothing, DEVICE], true),
            (&[DEVICE, DEVICE, transport, transport], false),
            (&[transport, transport, Shown::Computes, transport], true),
            (&[client; 10], false),
        ];
        for (shown, opens) in cases {
            let mut breakers = Breakers::default();
            show(&mut breakers, shown, at(5));
            assert_eq!(breakers.take_work(at(5)), !opens, "{shown:?}");
        }
        for kind in [F::Model, F::Overload] {
            let mut breakers = Breakers::default();
            show(&mut breakers, &[Shown::Fails(kind); 10], at(5));
            assert!(breakers.take_work(at(5)), "{kind}");
        }
    }

    #[test]
    fn failures_far_apart_are_not_in_a_row() {
        let mut breakers = Breakers::default();
        for now in [0, 20, 40] {
            show(&mut breakers, &[DEVICE], at(now));
        }
        assert!(breakers.take_work(at(40)));
        show(&mut breakers, &[DEVICE], at(41));
        show(&mut breakers, &[DEVICE], at(42));
        assert!(!breakers.take_work(at(42)));
    }

    #[test]
    fn after_a_pause_one_leg_is_tried_and_the_pause_doubles_to_its_limit() {
        let mut breakers = Breakers::default();
        show(&mut breakers, &[DEVICE; 3], at(0));
        let (mut now, mut leg) = (Duration::ZERO, 10);
        for pause in [1, 2, 4, 8, 16, 32, 60, 60] {
            now += at(pause);
            assert!(!breakers.take_work(now - Duration::from_millis(1)));
            assert!(breakers.take_work(now), "half open after {pause} s");
            breakers.on_dispatched(leg);
            assert!(!breakers.take_work(now), "one trial only");
            breakers.on_shown(leg - 1, DEVICE, now);
            assert!(
                !breakers.take_work(now + at(1000)),
                "an old leg is no trial"
            );
            breakers.on_shown(leg, DEVICE, now);
            leg += 1;
        }
        now += at(60);
        breakers.on_dispatched(leg);
        breakers.on_shown(leg, Shown::Nothing, now);
        assert!(breakers.take_work(now), "the next one is the trial");
        breakers.on_dispatched(leg + 1);
        breakers.on_shown(leg + 1, Shown::Computes, now);
        assert!(breakers.take_work(now) && breakers.read().all(|(_, open, _)| !open));
        show(&mut breakers, &[DEVICE; 3], now);
        assert!(breakers.take_work(now + at(1)), "pauses begin anew");
        let openings: Vec<u64> = breakers.read().map(|(_, _, total)| total).collect();
        assert_eq!(openings, [10, 0, 0]);
    }

    #[test]
    fn only_a_handover_closes_the_breaker_of_the_transport() {
        let mut breakers = Breakers::default();
        show(
            &mut breakers,
            &[Shown::Fails(FailureKind::Transport); 3],
            at(0),
        );
        show(&mut breakers, &[Shown::Computes], at(2));
        assert!(breakers.read().any(|(_, open, _)| open));
        show(&mut breakers, &[Shown::HandsOver], at(2));
        assert!(breakers.read().all(|(_, open, _)| !open));
    }

    #[test]
    fn a_worker_that_hands_nothing_over_any_more_is_not_tried_one_by_one_for_ever() {
        let mut breakers = Breakers::default();
        let transport = Shown::Fails(FailureKind::Transport);
        show(&mut breakers, &[transport; 3], at(0));
        show(&mut breakers, &[Shown::Computes], at(31));
        assert!(breakers.read().any(|(_, open, _)| open));
        show(&mut breakers, &[Shown::Computes], at(32));
        assert!(breakers.read().all(|(_, open, _)| !open));
    }

    #[test]
    fn a_worker_that_is_lost_again_and_again_is_left_alone() {
        let mut breakers = Breakers::default();
        for now in 0..3 {
            assert!(breakers.take_work(at(now)));
            breakers.on_lost(false, at(now));
            breakers.on_lost(true, at(now));
        }
        assert!(!breakers.take_work(at(2)));
        breakers.on_dispatched(1);
        breakers.on_lost(true, at(3));
        assert!(
            !breakers.take_work(at(4)) && breakers.take_work(at(5)),
            "twice as long"
        );
    }
}
