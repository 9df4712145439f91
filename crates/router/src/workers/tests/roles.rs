use std::sync::Arc;
use std::time::{Duration, Instant};

use tasuki_core::{RequestView, Role, WorkerId};
use tasuki_flow::WorkerKey;
use tasuki_flow::admission::Entrant;
use tasuki_flow::fleet::WorkerInfo;
use tasuki_flow::roles::{Objectives, RolesConfig};

use super::super::registry::Registry;
use super::super::roles::{RolesMode, RolesSettings};
use super::super::testing::{LocalWorker, ToWorker, local_info};
use super::registry;

/// With room for many requests.
fn info(engine: &str) -> WorkerInfo {
    WorkerInfo {
        num_blocks: 10_000,
        ..local_info(engine)
    }
}

struct Fleet {
    registry: Arc<Registry>,
    workers: Vec<(WorkerKey, LocalWorker)>,
    now: Instant,
}

impl Fleet {
    /// Two mixed workers.
    fn new(mode: RolesMode) -> Self {
        let registry = registry(2);
        let now = Instant::now();
        let workers = ["a", "b"].into_iter().zip(0..).map(|(engine, id)| {
            let (link, worker) = LocalWorker::new();
            let key = registry.join(WorkerId(id), info(engine), Arc::new(link), now);
            (key.expect("joined").key, worker)
        });
        let workers = workers.collect();
        let objectives = Objectives {
            ttft_s: None,
            tpot_s: Some(0.05),
        };
        let config = RolesConfig {
            objectives,
            ..RolesConfig::default()
        };
        registry.follow_roles(1, "me", RolesSettings { mode, config });
        Self {
            registry,
            workers,
            now,
        }
    }

    /// Looks, and lets workers take the roles that they are told, in this owner's name.
    fn look(&mut self, owner: &str) -> Vec<(u32, Role, u64)> {
        self.now += Duration::from_millis(100);
        self.registry.look_at_roles(true, self.now);
        let mut told = Vec::new();
        for (key, worker) in &mut self.workers {
            while let Some(message) = worker.received() {
                let ToWorker::SetRole(role, epoch) = message else {
                    panic!("{message:?}");
                };
                told.push((key.worker.0, role, epoch));
                let engine = ["a", "b"][key.worker.0 as usize];
                let told_by = WorkerInfo {
                    role,
                    role_epoch: epoch,
                    role_owner: owner.to_owned(),
                    ..info(engine)
                };
                assert!(self.registry.on_info(*key, told_by));
            }
        }
        told
    }

    /// Long prompts with short answers, for a while.
    fn ask(&self, requests: u32) {
        for request in 0..requests {
            let arrived = self.now + Duration::from_millis(20 * u64::from(request));
            let entrant = Entrant {
                view: RequestView::new(900, 2),
                tenant: "".into(),
                priority: 0,
                arrived: self.registry.since_start(arrived),
            };
            let mut state = self.registry.lock();
            state.fleet.on_arrival(&entrant.view, entrant.arrived);
        }
    }
}

#[test]
fn roles_are_claimed_shown_again_and_left_to_another_owner() {
    let mut fleet = Fleet::new(RolesMode::Follow);
    assert_eq!(fleet.look("follow:me"), [(0, Role::Mixed, 1)]);
    assert_eq!(fleet.look("follow:me"), []);
    fleet.now += Duration::from_secs(3);
    assert_eq!(fleet.look("follow:me"), [(0, Role::Mixed, 2)]);
    // Another router has taken them over.
    fleet.now += Duration::from_secs(3);
    assert_eq!(fleet.look("follow:other"), [(0, Role::Mixed, 3)]);
    fleet.now += Duration::from_secs(3);
    assert_eq!(fleet.look(""), []);
    // It is silent.
    fleet.now += Duration::from_secs(8);
    assert_eq!(fleet.look("follow:me"), [(0, Role::Mixed, 4)]);
}

#[test]
fn only_the_owner_changes_roles_and_only_where_they_follow() {
    let mut following = Fleet::new(RolesMode::Follow);
    following.ask(150);
    let told: Vec<_> = (0..10).flat_map(|_| following.look("follow:me")).collect();
    let changed = |told: &[(u32, Role, u64)]| told.iter().any(|(_, role, _)| *role != Role::Mixed);
    assert!(changed(&told), "{told:?}");
    let epochs: Vec<u64> = told.iter().map(|(_, _, epoch)| *epoch).collect();
    assert!(epochs.is_sorted_by(|one, next| one < next), "{told:?}");
    let mut other = Fleet::new(RolesMode::Follow);
    other.ask(150);
    let told: Vec<_> = (0..10).flat_map(|_| other.look("follow:zz")).collect();
    assert!(!changed(&told), "{told:?}");
    let mut fixed = Fleet::new(RolesMode::Fixed);
    fixed.ask(150);
    assert_eq!(fixed.look("follow:me"), []);
}
