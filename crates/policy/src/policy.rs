//! What every placement policy does, and which ones there are.

use tasuki_core::{ModelId, RequestView, WorkerId, WorkerView};

use crate::{Choosing, NoPlacement, Placement, Rule, SimplePolicy, WorkerIndex};

/// Decides who prefills and who decodes, from what it is told of the workers.
///
/// The answer is a function of the arguments and of the workers alone.
pub trait Policy: std::fmt::Debug + Send {
    /// Adds a worker that serves a model, or takes its changes over.
    fn update(&mut self, model: ModelId, worker: &WorkerView);

    /// Forgets a worker.
    fn remove(&mut self, worker: WorkerId);

    /// Chooses the pair for a request.
    ///
    /// # Errors
    ///
    /// [`NoPlacement`] says which kind of worker is missing.
    fn place(&self, request: &RequestView, how: Choosing<'_>) -> Result<Placement, NoPlacement>;

    /// Chooses another decode worker for a request that `prefill` is working on or
    /// has finished; never one of `tried`. `None` when a new placement is the better way.
    fn place_decode(
        &self,
        request: &RequestView,
        prefill: WorkerId,
        tried: &[WorkerId],
        how: Choosing<'_>,
    ) -> Option<WorkerId>;
}

/// The policies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PolicyKind {
    /// The least expected work: see [`WorkerIndex`].
    #[default]
    Cost,
    /// By role, and by a rule that computes no cost: see [`SimplePolicy`].
    Simple(Rule),
}

impl PolicyKind {
    /// A policy of this kind that knows no worker yet.
    pub fn build(self) -> Box<dyn Policy> {
        match self {
            PolicyKind::Cost => Box::new(WorkerIndex::default()),
            PolicyKind::Simple(rule) => Box::new(SimplePolicy::new(rule)),
        }
    }
}
