//! Which model a worker serves, by what it says of itself.

use tasuki_core::{Identity, ModelId};

use super::{JoinError, WorkerInfo};

/// The models that a shell serves.
///
/// One model may have workers of several identities: other weights, during an upgrade, or
/// another dtype. KV moves only within an identity, and so do begun requests.
#[derive(Debug)]
pub(super) struct Models {
    /// Of each model, the names that its workers may give it.
    names: Vec<Vec<String>>,
    /// Names and identities of the workers admitted so far, where there is one model.
    seen: Vec<(String, Identity)>,
}

impl Models {
    pub(super) fn new(names: Vec<Vec<String>>) -> Self {
        Self {
            names,
            seen: Vec::new(),
        }
    }

    /// The model that a worker serves.
    ///
    /// A single model takes workers of any name, but all of one: the shell has the text of one
    /// model. Equal names or equal identities prove it, for a model may have two names.
    pub(super) fn of(&mut self, info: &WorkerInfo) -> Result<ModelId, JoinError> {
        let named = self
            .names
            .iter()
            .position(|names| names.contains(&info.model));
        if self.names.len() > 1 {
            let at = named.ok_or_else(|| JoinError::NotServed {
                theirs: info.model.clone(),
                served: self
                    .names
                    .iter()
                    .filter_map(|n| n.first().cloned())
                    .collect(),
            })?;
            return Ok(ModelId(u32::try_from(at).unwrap_or(u32::MAX)));
        }
        let worker = (info.model.clone(), info.domain.identity);
        let known =
            |(name, identity): &(String, Identity)| *name == worker.0 || *identity == worker.1;
        if named.is_none()
            && let Some((ours, _)) = self.seen.first()
            && !self.seen.iter().any(known)
        {
            return Err(JoinError::OtherModel {
                theirs: worker.0,
                ours: ours.clone(),
            });
        }
        if !self.seen.contains(&worker) {
            self.seen.push(worker);
        }
        Ok(ModelId::default())
    }
}
