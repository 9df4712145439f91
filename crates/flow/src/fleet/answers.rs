//! What the fleet answers of a worker, other than yes.

use tasuki_core::WorkerId;
use tasuki_policy::NoPlacement;

/// Why a worker is not admitted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum JoinError {
    #[error("worker {0} was removed")]
    Removed(WorkerId),
    #[error("the worker is already connected as worker {0}: it is listed twice")]
    Twice(WorkerId),
    #[error(
        "the worker serves {theirs:?}, the workers before it {ours:?} with other weights: give \
         the router both models by name, or restart it"
    )]
    OtherModel { theirs: String, ours: String },
    #[error(
        "the worker serves {theirs:?}, this router serves {served:?}: give the router that model, \
         or the worker one of these names"
    )]
    NotServed { theirs: String, served: Vec<String> },
    #[error(
        "{model:?} is served by workers of {ours} here, and this is a worker of {theirs}, which \
         answers in its own way: give its model another name, with --served-model-name or \
         --served-name"
    )]
    OtherKind {
        model: String,
        ours: &'static str,
        theirs: &'static str,
    },
}

/// Why requests should not come yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NotReady {
    #[error("{waiting} of {workers} workers have not answered yet")]
    Starting { waiting: usize, workers: usize },
    #[error(transparent)]
    NoPlacement(#[from] NoPlacement),
}

/// What a worker's silence means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Silence {
    Fine,
    /// It gets no new work.
    Suspect,
    /// Its requests go elsewhere.
    Lost,
}
