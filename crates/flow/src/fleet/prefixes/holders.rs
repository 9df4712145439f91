//! The workers that hold a chunk.

use tasuki_core::WorkerId;

/// In the order in which they came to hold it. Most chunks have one holder, which takes no
/// memory of its own.
#[derive(Debug)]
pub enum Holders {
    One(WorkerId),
    /// At least two.
    Many(Vec<WorkerId>),
}

impl Holders {
    /// Adds a worker that is not there.
    pub fn add(&mut self, worker: WorkerId) {
        match self {
            Holders::One(first) => *self = Holders::Many(vec![*first, worker]),
            Holders::Many(all) => all.push(worker),
        }
    }

    /// False: nobody is left.
    pub fn remove(&mut self, worker: WorkerId) -> bool {
        match self {
            Holders::One(last) => return *last != worker,
            Holders::Many(all) => {
                all.retain(|holder| *holder != worker);
                if let [last] = all[..] {
                    *self = Holders::One(last);
                }
            }
        }
        true
    }

    pub fn all(&self) -> &[WorkerId] {
        match self {
            Holders::One(one) => std::slice::from_ref(one),
            Holders::Many(all) => all,
        }
    }
}
