//! Roles that follow the load, or what would if they did: the balancer of each model, what it
//! orders, and what it tells of itself.
//!
//! One task looks at the workers a few times a second. It takes what it needs while the registry is
//! locked and decides when it is not.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt;
use std::time::{Duration, Instant};

use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use tasuki_core::{Health, ModelId, Role};
use tasuki_flow::FleetState;
use tasuki_flow::roles::{
    Balancer, Bound, Claim, Held, Look, Order, Ownership, RolesConfig, Wanted,
};
use tokio::time::sleep;

use super::Registry;
use super::registry::State;

const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How often the number of workers that the load asks for is reckoned, in looks.
const WANTED_EVERY: u32 = 20;

/// Whether roles change by themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RolesMode {
    /// Workers keep their roles until an operator changes them.
    #[default]
    Fixed,
    /// They follow the load.
    Follow,
}

/// How roles are kept.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct RolesSettings {
    pub mode: RolesMode,
    pub config: RolesConfig,
}

/// The roles of one model's workers.
#[derive(Debug)]
pub struct Follower {
    model: ModelId,
    /// As workers name it.
    name: String,
    balancer: Balancer,
    /// `None`: roles are fixed.
    ownership: Option<Ownership>,
    /// From, to, what limited the workers.
    changes: BTreeMap<[&'static str; 3], u64>,
    wanted: Option<Wanted>,
}

impl Registry {
    /// Begins to look at the roles of so many models, in the name of this router.
    pub fn follow_roles(&self, models: u32, name: &str, settings: RolesSettings) {
        let now = self.since_start(Instant::now());
        let follower = |model| Follower {
            model: ModelId(model),
            name: String::new(),
            balancer: Balancer::new(ModelId(model), settings.config),
            ownership: (settings.mode == RolesMode::Follow).then(|| Ownership::new(name, now)),
            changes: BTreeMap::new(),
            wanted: None,
        };
        self.lock().roles = (0..models).map(follower).collect();
    }

    /// Looks at the roles, again and again.
    pub async fn keep_roles(&self) -> Infallible {
        let mut looks = 0;
        loop {
            sleep(LOOK_EVERY).await;
            self.look_at_roles(looks % WANTED_EVERY == 0, Instant::now());
            looks += 1;
        }
    }

    pub(super) fn look_at_roles(&self, wants: bool, now: Instant) {
        let now = self.since_start(now);
        let models = self.lock().roles.len();
        for index in 0..models {
            let Some((look, owns)) = self.lock().look(index, now) else {
                continue;
            };
            let wanted = wants.then(|| look.wanted());
            if wanted.is_some() {
                self.lock().roles[index].wanted = wanted;
            }
            if owns {
                let mut balancer = self.lock().roles[index].balancer.clone();
                let orders = balancer.decide(&look, now);
                self.lock().change(index, balancer, orders, now);
            }
        }
    }

    /// Metrics of what follows the load.
    pub(super) fn encode_roles(&self, encoder: &mut DescriptorEncoder) -> Result<(), fmt::Error> {
        let state = self.lock();
        let gauge = MetricType::Gauge;
        let help = "Workers of each role that the load asks for; reason: prefill or decode, by which \
                    one worker fewer would be too few";
        let mut family = encoder.encode_descriptor("workers_wanted", help, None, gauge)?;
        for follower in &state.roles {
            let Some(wanted) = follower.wanted else {
                continue;
            };
            let topology = wanted.topology;
            for (role, count) in [
                (Role::Prefill, topology.prefill),
                (Role::Decode, topology.decode),
                (Role::Mixed, topology.mixed),
            ] {
                let labels = [
                    ("model", follower.name.as_str()),
                    ("role", role.as_str()),
                    ("reason", word(wanted.bound)),
                ];
                ConstGauge::new(i64::from(count)).encode(family.encode_family(&labels)?)?;
            }
        }
        let owned = state.roles.iter();
        let owned = owned.filter_map(|one| Some((one, one.ownership.as_ref()?)));
        let owned: Vec<_> = owned.collect();
        let help = "Whether this router moves the workers' roles";
        let mut family = encoder.encode_descriptor("roles_owner", help, None, gauge)?;
        for (follower, ownership) in &owned {
            let labels = [("model", follower.name.as_str())];
            let owns = i64::from(ownership.owns());
            ConstGauge::new(owns).encode(family.encode_family(&labels)?)?;
        }
        let counter = MetricType::Counter;
        let help = "Times that this router took the roles over";
        let mut family = encoder.encode_descriptor("roles_taken", help, None, counter)?;
        for (follower, ownership) in &owned {
            let labels = [("model", follower.name.as_str())];
            ConstCounter::new(ownership.taken).encode(family.encode_family(&labels)?)?;
        }
        let help = "Roles that this router changed; reason: prefill or decode, by which the workers \
                    were too few";
        let mut family = encoder.encode_descriptor("role_changes", help, None, counter)?;
        for (follower, _) in &owned {
            for (&[from, to, reason], &count) in &follower.changes {
                let labels = [
                    ("model", follower.name.as_str()),
                    ("from", from),
                    ("to", to),
                    ("reason", reason),
                ];
                ConstCounter::new(count).encode(family.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}

fn word(bound: Bound) -> &'static str {
    match bound {
        Bound::Prefill => "prefill",
        Bound::Decode => "decode",
    }
}

/// The roles of a model's workers that are connected, and who set them.
fn held(fleet: &FleetState, model: ModelId) -> impl Iterator<Item = Held<'_>> {
    let here = fleet.workers().filter(move |state| {
        state.model == Some(model) && !matches!(state.view.health, Health::Down)
    });
    here.filter_map(|state| {
        let info = state.info.as_ref()?;
        Some(Held {
            worker: state.view.id,
            role: state.view.role,
            owner: &info.role_owner,
            epoch: info.role_epoch,
        })
    })
}

impl State {
    /// Looks at the roles of a model, and shows that they are ours if they are. True: they are.
    fn look(&mut self, index: usize, now: Duration) -> Option<(Look, bool)> {
        let follower = self.roles.get_mut(index)?;
        let model = follower.model;
        let waiting = self.admission.waiting_for(model);
        let look = follower.balancer.look(&self.fleet, waiting, now);
        let mut workers = self.fleet.workers().filter(|one| one.model == Some(model));
        if let Some(info) = workers.find_map(|state| state.info.as_ref())
            && info.model != follower.name
        {
            follower.name.clone_from(&info.model);
        }
        let mut owns = false;
        if let Some(ownership) = &mut follower.ownership {
            let claim = ownership.look(held(&self.fleet, model), now);
            let (owner, epoch) = (ownership.name().to_owned(), ownership.next_epoch());
            owns = claim == Claim::Own;
            if let Claim::Set(worker, role) = claim {
                if !ownership.owns() {
                    tracing::info!(model = follower.name, owner, epoch, "takes the roles over");
                }
                self.set_role(worker, role, &owner, epoch);
            }
        }
        Some((look?, owns))
    }

    /// Carries out what was decided.
    fn change(&mut self, index: usize, balancer: Balancer, orders: Vec<Order>, now: Duration) {
        if let Some(follower) = self.roles.get_mut(index) {
            follower.balancer = balancer;
        }
        for order in orders {
            self.carry_out(index, &order, now);
        }
    }

    fn carry_out(&mut self, index: usize, order: &Order, now: Duration) {
        let Some(follower) = self.roles.get_mut(index) else {
            return;
        };
        let Some(ownership) = &mut follower.ownership else {
            return;
        };
        let (owner, epoch) = (ownership.name().to_owned(), ownership.next_epoch());
        ownership.on_set(now);
        let [from, to] = [order.from, order.to].map(Role::as_str);
        let change = [from, to, word(order.reason.bound())];
        *follower.changes.entry(change).or_default() += 1;
        let address = self
            .members
            .get(&order.worker)
            .map(|member| member.address.to_string());
        tracing::info!(
            worker = order.worker.0,
            address,
            from = %order.from,
            to = %order.to,
            reason = %order.reason,
            owner,
            epoch,
            "changes a role",
        );
        self.set_role(order.worker, order.to, &owner, epoch);
    }
}
