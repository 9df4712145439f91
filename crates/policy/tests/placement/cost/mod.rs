//! Placement by cost: what must hold for every fleet and every request.

mod limits;
mod loads;
mod roles;
mod search;

use tasuki_core::{CostModel, ModelId, RequestView, WorkerView};
use tasuki_policy::{Choosing, NoPlacement, Placement, Policy, WorkerIndex};

/// The policy's answer, with nothing measured yet.
fn choose(
    workers: &[WorkerView],
    request: &RequestView,
    strict_roles: bool,
    tie: u64,
) -> Result<Placement, NoPlacement> {
    let model = CostModel::default();
    let how = Choosing {
        model: &model,
        strict_roles,
        tie,
    };
    index(workers).place(request, how)
}

fn index(workers: &[WorkerView]) -> WorkerIndex {
    let mut index = WorkerIndex::default();
    for worker in workers {
        index.update(ModelId::default(), worker);
    }
    index
}

fn pair(workers: &[WorkerView], request: &RequestView) -> (u32, u32) {
    let placement = choose(workers, request, false, 0).expect("a placement");
    (placement.prefill.0, placement.decode.0)
}

fn strict_pair(workers: &[WorkerView], request: &RequestView) -> (u32, u32) {
    let placement = choose(workers, request, true, 0).expect("a placement");
    (placement.prefill.0, placement.decode.0)
}
