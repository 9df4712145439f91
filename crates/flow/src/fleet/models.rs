//! Which model a worker serves, by what it says of itself.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use tasuki_core::{Identity, ModelId, Payload, RequestView, WorkerId};

use super::{JoinError, WorkerInfo};

/// The models that a shell serves.
///
/// Those of workers that take tokens are given at the start, for the shell has their text side.
/// One model may have workers of several identities: other weights, during an upgrade, or
/// another dtype. KV moves only within an identity, and so do begun requests. Models of workers
/// that take requests as they are become known with their first worker.
#[derive(Debug)]
pub(super) struct Models {
    /// Of each model, the names that its workers may give it; of opaque ones, gave it. No adapters.
    names: Vec<Vec<String>>,
    /// Where a name is among them: a worker may have thousands.
    positions: HashMap<String, usize>,
    /// By name, of each model that has one of it: the workers that have it, up or not. Two models
    /// may have adapters of one name: that of the first one is served.
    adapters: BTreeMap<String, BTreeMap<ModelId, Arc<BTreeSet<WorkerId>>>>,
    /// So many of them, the first ones, are served by workers that take tokens.
    of_tokens: usize,
    /// Names and identities of the workers admitted so far, where there is one model.
    seen: Vec<(String, Identity)>,
}

/// A model of workers that take requests as they are.
#[derive(Debug)]
pub struct OpaqueModel<'a> {
    pub id: ModelId,
    /// The first one is preferred. They stay though its workers leave.
    pub names: &'a [String],
    /// By name, as long as a worker that has one is not removed.
    pub adapters: Vec<&'a String>,
}

impl Models {
    pub(super) fn new(names: Vec<Vec<String>>) -> Self {
        let mut positions = HashMap::new();
        for (at, names) in names.iter().enumerate() {
            for name in names {
                positions.entry(name.clone()).or_insert(at);
            }
        }
        Self {
            of_tokens: names.len(),
            names,
            positions,
            adapters: BTreeMap::new(),
            seen: Vec::new(),
        }
    }

    /// What a worker of a model says of its names and adapters, when it joins and later.
    pub(super) fn learn_names(&mut self, worker: WorkerId, model: ModelId, info: &WorkerInfo) {
        if info.capabilities.payload == Payload::Opaque {
            // A name of another kind of worker stays theirs.
            let _ = self.of_opaque(info);
        }
        self.forget(worker);
        for name in &info.adapters {
            let models = self.adapters.entry(name.clone()).or_default();
            Arc::make_mut(models.entry(model).or_default()).insert(worker);
        }
    }

    /// Forgets the adapters that a worker had.
    pub(super) fn forget(&mut self, worker: WorkerId) {
        self.adapters.retain(|_, models| {
            models.retain(|_, workers| {
                if workers.contains(&worker) {
                    Arc::make_mut(workers).remove(&worker);
                }
                !workers.is_empty()
            });
            !models.is_empty()
        });
    }

    /// The workers that have all adapters that a request is for. Adapters that no worker has which
    /// `may` take it do not count; `None`: there is no other one.
    pub(super) fn with_adapters(
        &self,
        request: &RequestView,
        may: impl Fn(&WorkerId) -> bool,
    ) -> Option<Arc<BTreeSet<WorkerId>>> {
        let names = request.adapters.iter();
        let sets = names.filter_map(|name| self.adapters.get(&**name)?.get(&request.model));
        let mut sets = sets.filter(|set| set.iter().any(&may));
        let first = Arc::clone(sets.next()?);
        Some(sets.fold(first, |all, set| Arc::new(&*all & &**set)))
    }

    /// The model that a worker serves.
    pub(super) fn of(&mut self, info: &WorkerInfo) -> Result<ModelId, JoinError> {
        match info.capabilities.payload {
            Payload::Tokens => self.of_tokens(info),
            Payload::Opaque => self.of_opaque(info),
        }
    }

    /// Models of workers that take requests as they are.
    pub(super) fn opaque(&self) -> impl Iterator<Item = OpaqueModel<'_>> {
        let numbered = self.names.iter().enumerate().skip(self.of_tokens);
        numbered.map(|(at, names)| {
            let first = |models: &BTreeMap<ModelId, _>| models.keys().next() == Some(&id(at));
            let adapters = self.adapters.iter();
            let adapters = adapters
                .filter(|(name, models)| first(models) && !self.positions.contains_key(*name));
            OpaqueModel {
                id: id(at),
                names,
                adapters: adapters.map(|(name, _)| name).collect(),
            }
        })
    }

    /// A single model takes workers of any name, but all of one: the shell has the text of one
    /// model. Equal names or equal identities prove it, for a model may have two names.
    fn of_tokens(&mut self, info: &WorkerInfo) -> Result<ModelId, JoinError> {
        let named = self.position(&info.model);
        if let Some(at) = named.filter(|at| *at >= self.of_tokens) {
            return Err(self.other_kind(&info.model, at, Payload::Tokens));
        }
        if self.of_tokens != 1 {
            let at = named.ok_or_else(|| JoinError::NotServed {
                theirs: info.model.clone(),
                served: self.names[..self.of_tokens]
                    .iter()
                    .filter_map(|n| n.first().cloned())
                    .collect(),
            })?;
            return Ok(id(at));
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

    /// The model of any of the worker's names. It has all of them from now on.
    fn of_opaque(&mut self, info: &WorkerInfo) -> Result<ModelId, JoinError> {
        let theirs = || std::iter::once(&info.model).chain(&info.further_names);
        let known: Vec<_> = theirs().filter_map(|name| self.position(name)).collect();
        if let Some(at) = known.iter().find(|at| **at < self.of_tokens) {
            return Err(self.other_kind(&info.model, *at, Payload::Opaque));
        }
        let at = known.first().copied().unwrap_or_else(|| {
            self.names.push(Vec::new());
            self.names.len() - 1
        });
        for name in theirs() {
            if self.position(name).is_none() {
                self.names[at].push(name.clone());
                self.positions.insert(name.clone(), at);
            }
        }
        Ok(id(at))
    }

    fn position(&self, name: &String) -> Option<usize> {
        self.positions.get(name).copied()
    }

    fn other_kind(&self, name: &str, at: usize, theirs: Payload) -> JoinError {
        let kind = |tokens| match tokens {
            true => "Tasuki",
            false => "another engine",
        };
        let ours = self.names[at].first();
        JoinError::OtherKind {
            model: ours.map_or(name, String::as_str).to_owned(),
            ours: kind(theirs == Payload::Opaque),
            theirs: kind(theirs == Payload::Tokens),
        }
    }
}

fn id(at: usize) -> ModelId {
    ModelId(u32::try_from(at).unwrap_or(u32::MAX))
}
