//! The order in which requests of one model wait: by priority, within it fair among tenants.
//!
//! Start-time fair queueing (Goyal, Vin, Cheng: SIGCOMM 1996). Each tenant's requests follow
//! one another on a scale of work, and the least start is next; so tenants that always have
//! requests waiting get equal work, and one that comes seldom need not wait for the others.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use tasuki_core::{Forecast, RequestView, WorkerId};

use super::AdmissionConfig;

/// Who was in the queue for less came to a worker with room.
const WAITED: Duration = Duration::from_millis(10);

/// A waiting request. Numbers count up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EntrantId(pub u64);

/// A request that asks to be admitted.
#[derive(Debug, Clone)]
pub struct Entrant {
    pub view: RequestView,
    pub tenant: Arc<str>,
    /// Less goes first.
    pub priority: i32,
    /// Of the shell's clock.
    pub arrived: Duration,
}

/// A request in the queue.
#[derive(Debug)]
pub(super) struct Waiting {
    pub id: EntrantId,
    pub entrant: Entrant,
    /// As of its arrival.
    pub forecast: Forecast,
    /// Whether it was found to be in time when it came.
    pub is_new: bool,
}

impl Waiting {
    /// As a placement would see it now, which avoids workers that are `awaited` by others. Without
    /// admission no request waits.
    pub fn view(
        &self,
        config: &AdmissionConfig,
        now: Duration,
        awaited: &BTreeSet<WorkerId>,
    ) -> RequestView {
        let mut view = self.entrant.view.clone();
        view.avoid.extend(awaited);
        match config.off {
            true => view,
            false => RequestView {
                waited: now.saturating_sub(self.entrant.arrived) >= WAITED,
                ..view
            },
        }
    }

    pub fn sequences(&self) -> u64 {
        u64::from(self.entrant.view.choices)
    }

    pub fn tokens(&self) -> u64 {
        u64::from(self.entrant.view.prompt_tokens)
    }
}

/// A place in the queue: priority, start, number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Place(i32, Start, EntrantId);

/// On the scale of work.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Start(f64);

impl Eq for Start {}

impl PartialOrd for Start {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Start {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

/// Tenants without a request are forgotten beyond so many.
const MANY_TENANTS: usize = 1024;

/// What is before a request in the queue.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct Ahead {
    pub requests: usize,
    pub work_s: f64,
    /// Of its own tenant.
    pub own_work_s: f64,
}

#[derive(Debug, Default)]
pub(super) struct Queue {
    order: BTreeMap<Place, Waiting>,
    places: HashMap<EntrantId, Place>,
    /// Where each tenant's next request starts at the earliest.
    ends: HashMap<Arc<str>, f64>,
    /// The start of the last request that was let in.
    now: f64,
    pub sequences: u64,
    pub tokens: u64,
    /// Whether any is new.
    pub has_new: bool,
}

impl Queue {
    pub fn push(&mut self, waiting: Waiting) {
        if self.ends.len() > MANY_TENANTS {
            let now = self.now;
            self.ends.retain(|_, end| *end > now);
        }
        let tenant = Arc::clone(&waiting.entrant.tenant);
        let end = self.ends.entry(tenant).or_default();
        let start = end.max(self.now);
        *end = start + waiting.forecast.work_s;
        let place = Place(waiting.entrant.priority, Start(start), waiting.id);
        self.sequences += waiting.sequences();
        self.tokens += waiting.tokens();
        self.has_new |= waiting.is_new;
        self.places.insert(waiting.id, place);
        self.order.insert(place, waiting);
    }

    pub fn get(&self, id: EntrantId) -> Option<&Waiting> {
        self.order.get(self.places.get(&id)?)
    }

    pub fn last(&self) -> Option<&Waiting> {
        self.order.last_key_value().map(|(_, waiting)| waiting)
    }

    pub fn iter(&self) -> impl Iterator<Item = &Waiting> {
        self.order.values()
    }

    /// None of them is new any more.
    pub fn all_seen(&mut self) {
        if std::mem::take(&mut self.has_new) {
            for waiting in self.order.values_mut() {
                waiting.is_new = false;
            }
        }
    }

    pub fn len(&self) -> usize {
        self.order.len()
    }

    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// Takes a request out that is let in.
    pub fn let_in(&mut self, id: EntrantId) -> Option<Waiting> {
        let place = *self.places.get(&id)?;
        self.now = self.now.max(place.1.0);
        self.take(place)
    }

    /// Takes a request out that is not let in.
    pub fn remove(&mut self, id: EntrantId) -> Option<Waiting> {
        let place = *self.places.get(&id)?;
        let waiting = self.take(place)?;
        let start = place.1.0;
        // What its tenant sends next need not stand behind work that is never done.
        if let Some(end) = self.ends.get_mut(&waiting.entrant.tenant)
            && *end == start + waiting.forecast.work_s
        {
            *end = start;
        }
        Some(waiting)
    }

    pub fn ahead(&self, id: EntrantId) -> Ahead {
        let mut ahead = Ahead::default();
        let Some(place) = self.places.get(&id) else {
            return ahead;
        };
        let tenant = self.order.get(place).map(|waiting| &waiting.entrant.tenant);
        for waiting in self.order.range(..place).map(|(_, waiting)| waiting) {
            ahead.requests += 1;
            ahead.work_s += waiting.forecast.work_s;
            if Some(&waiting.entrant.tenant) == tenant {
                ahead.own_work_s += waiting.forecast.work_s;
            }
        }
        ahead
    }

    /// Whether tenants other than this one wait.
    pub fn has_others(&self, tenant: &str) -> bool {
        let mut waiting = self.order.values();
        waiting.any(|waiting| &*waiting.entrant.tenant != tenant)
    }

    fn take(&mut self, place: Place) -> Option<Waiting> {
        let waiting = self.order.remove(&place)?;
        self.places.remove(&waiting.id);
        self.sequences -= waiting.sequences();
        self.tokens -= waiting.tokens();
        Some(waiting)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn push(queue: &mut Queue, id: u64, tenant: &str, work_s: f64) {
        queue.push(Waiting {
            id: EntrantId(id),
            entrant: Entrant {
                view: RequestView::new(1, 1),
                tenant: tenant.into(),
                priority: 0,
                arrived: Duration::ZERO,
            },
            forecast: Forecast {
                work_s,
                ..Forecast::default()
            },
            is_new: true,
        });
    }

    fn order(queue: &Queue) -> Vec<u64> {
        queue.iter().map(|waiting| waiting.id.0).collect()
    }

    #[test]
    fn work_that_is_never_done_holds_up_nothing_of_its_tenant() {
        let mut queue = Queue::default();
        push(&mut queue, 1, "a", 5.0);
        queue.remove(EntrantId(1));
        push(&mut queue, 2, "a", 5.0);
        push(&mut queue, 3, "b", 1.0);
        assert_eq!(order(&queue), [2, 3]);
    }

    #[test]
    fn a_tenant_saves_nothing_up_while_it_sends_nothing() {
        let mut queue = Queue::default();
        for id in [1, 2, 3] {
            push(&mut queue, id, "a", 5.0);
        }
        queue.let_in(EntrantId(1));
        queue.let_in(EntrantId(2)); // of the scale 0 to 10, where its next one begins
        for id in 4..14 {
            push(&mut queue, id, "b", 1.0);
        }
        assert_eq!(order(&queue)[..7], [4, 5, 6, 7, 8, 3, 9]);
    }
}
