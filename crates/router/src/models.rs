//! The models that are served: their names, and their text.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tasuki_core::ModelId;
use tasuki_text::{ModelText, TextError};

use crate::app::MAX_QUOTED_CHARS;
use crate::error::ApiError;
use crate::grammar::Grammars;

/// What `--model`, `--alias` and `--served-model-name` say of one model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelSpec {
    /// For requests, the preferred one first; never empty.
    pub names: Vec<String>,
    /// Tokenizer, chat template, config.
    pub path: PathBuf,
}

impl ModelSpec {
    /// The names that its workers may give it: those for requests, and its folder's.
    pub fn worker_names(&self) -> Vec<String> {
        let folder = folder_name(&self.path);
        let mut names = self.names.clone();
        names.push(folder);
        names
    }
}

/// Why models cannot be served together.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NamesError {
    #[error("{0:?} names two models: give one of them another name, as in --model NAME=PATH")]
    Twice(String),
    #[error("--alias {alias}={name}: no --model has the name {name:?}; there is {models}")]
    NoModel {
        alias: String,
        name: String,
        models: String,
    },
    #[error(
        "--served-model-name is for a single model, and there are {0}: use --model NAME=PATH and \
         --alias ALIAS=NAME"
    )]
    ServedName(usize),
}

/// The models with a text side here, and aliases of others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Names {
    pub models: Vec<ModelSpec>,
    /// Alias and name, of models that workers of other engines serve.
    pub foreign: Vec<(String, String)>,
}

/// Names the models: `given` and `aliases` as in `--model` and `--alias`, `served` as in
/// `--served-model-name`. `may_be_foreign`: workers of other engines may bring further models.
///
/// # Errors
///
/// [`NamesError`]: two models of one name, an alias of none.
pub fn name_models(
    given: &[(Option<String>, PathBuf)],
    served: &[String],
    aliases: &[(String, String)],
    may_be_foreign: bool,
) -> Result<Names, NamesError> {
    let mut foreign = Vec::new();
    if given.len() > 1 && !served.is_empty() {
        return Err(NamesError::ServedName(given.len()));
    }
    let mut models: Vec<ModelSpec> = Vec::new();
    for (name, path) in given {
        let mut names: Vec<String> = name.iter().chain(served).cloned().collect();
        if names.is_empty() {
            names.push(folder_name(path));
        }
        models.push(ModelSpec {
            names,
            path: path.clone(),
        });
    }
    for (alias, name) in aliases {
        let model = models.iter_mut().find(|model| model.names.contains(name));
        let Some(model) = model else {
            if may_be_foreign {
                foreign.push((alias.clone(), name.clone()));
                continue;
            }
            let first = models.iter().filter_map(|model| model.names.first());
            return Err(NamesError::NoModel {
                alias: alias.clone(),
                name: name.clone(),
                models: first.cloned().collect::<Vec<_>>().join(", "),
            });
        };
        model.names.push(alias.clone());
    }
    let mut owners: HashMap<&String, usize> = HashMap::new();
    for (at, model) in models.iter().enumerate() {
        for name in &model.names {
            if owners.insert(name, at).is_some_and(|owner| owner != at) {
                return Err(NamesError::Twice(name.clone()));
            }
        }
    }
    Ok(Names { models, foreign })
}

fn folder_name(path: &Path) -> String {
    let folder = path.file_name().unwrap_or(path.as_os_str());
    folder.to_string_lossy().into_owned()
}

/// Normalizers may shorten a text; none of a causal model does so by more.
const NORMALIZER_MARGIN: usize = 4;

/// How long a text may be. Longer texts are refused before they are tokenized, which takes seconds
/// for megabytes.
#[derive(Debug, Clone, Copy)]
pub struct TextLimit {
    longest_token_bytes: usize,
}

impl TextLimit {
    pub fn new(text: &ModelText) -> Self {
        let ids = 0..u32::try_from(text.vocab_size()).unwrap_or(u32::MAX);
        let longest = ids.map(|id| text.token_bytes(id).len()).max();
        Self {
            longest_token_bytes: longest.unwrap_or(0).max(1),
        }
    }

    /// # Errors
    /// When no tokenization of `text` can fit `max_model_len` tokens.
    pub fn check(&self, param: &str, text: &str, max_model_len: u32) -> Result<(), ApiError> {
        let limit_bytes = (max_model_len as usize)
            .saturating_mul(self.longest_token_bytes)
            .saturating_mul(NORMALIZER_MARGIN);
        if text.len() <= limit_bytes {
            return Ok(());
        }
        Err(ApiError::Invalid {
            message: format!(
                "{param} has {} bytes of text, far more than fit {max_model_len} tokens, the limit \
                 for prompt and output together.",
                text.len()
            ),
            param: Some(param.to_owned()),
            code: Some("context_length_exceeded"),
        })
    }
}

/// One model.
pub struct Model {
    pub id: ModelId,
    /// The preferred one first; never empty.
    pub names: Vec<String>,
    pub text: Arc<ModelText>,
    pub text_limit: TextLimit,
    /// Those that answers must match.
    pub grammars: Grammars,
}

/// All models with a text side here.
pub struct Models(Vec<Arc<Model>>);

impl Models {
    /// Reads their folders.
    ///
    /// # Errors
    ///
    /// The folder that cannot be read, and why.
    pub fn load(specs: &[ModelSpec]) -> Result<Self, (PathBuf, TextError)> {
        let load = |spec: &ModelSpec| match ModelText::load(&spec.path) {
            Ok(text) => Ok((spec.names.clone(), Arc::new(text))),
            Err(error) => Err((spec.path.clone(), error)),
        };
        let texts: Result<Vec<_>, _> = specs.iter().map(load).collect();
        Ok(Self::new(texts?))
    }

    pub fn new(texts: Vec<(Vec<String>, Arc<ModelText>)>) -> Self {
        let models = (0u32..).zip(texts).map(|(id, (names, text))| Model {
            id: ModelId(id),
            names,
            text_limit: TextLimit::new(&text),
            grammars: Grammars::new(Arc::clone(&text)),
            text,
        });
        Self(models.map(Arc::new).collect())
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Every name with its model.
    pub fn named(&self) -> impl Iterator<Item = (&String, &Arc<Model>)> {
        let models = self.0.iter();
        models.flat_map(|model| model.names.iter().map(move |name| (name, model)))
    }

    /// The model of a request and the name for its answer: the preferred one of the only
    /// model if it gave none.
    ///
    /// # Errors
    ///
    /// A name that is not served; none where there are several models.
    pub fn find(&self, requested: Option<&str>) -> Result<(String, Arc<Model>), ApiError> {
        match (requested, self.0.as_slice()) {
            (None, [model]) => Ok((model.names[0].clone(), Arc::clone(model))),
            (None, _) => Err(ApiError::invalid(
                "model",
                format!("model is missing. Served here: {}.", self.served()),
            )),
            (Some(wanted), _) => match self.named().find(|(name, _)| *name == wanted) {
                Some((name, model)) => Ok((name.clone(), Arc::clone(model))),
                None => Err(ApiError::UnknownModel {
                    requested: wanted.chars().take(MAX_QUOTED_CHARS).collect(),
                    served: self.served(),
                }),
            },
        }
    }

    /// Every name, for an error.
    pub fn served(&self) -> String {
        let names = self.named().map(|(name, _)| name.as_str());
        names.collect::<Vec<_>>().join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::TestModel;

    fn models(
        given: &[(Option<&str>, &str)],
        served: &[&str],
        aliases: &[(&str, &str)],
    ) -> Result<Vec<Vec<String>>, NamesError> {
        let own = str::to_owned;
        let given = given
            .iter()
            .map(|(name, path)| (name.map(own), path.into()));
        let served: Vec<String> = served.iter().copied().map(own).collect();
        let aliases = aliases.iter().map(|(alias, name)| (own(alias), own(name)));
        let given: Vec<(Option<String>, PathBuf)> = given.collect();
        let names = name_models(&given, &served, &aliases.collect::<Vec<_>>(), false)?;
        Ok(names.models.into_iter().map(|spec| spec.names).collect())
    }

    #[test]
    fn names_come_from_folders_options_and_aliases() {
        assert_eq!(models(&[(None, "/m/tiny")], &[], &[]).unwrap(), [["tiny"]]);
        assert_eq!(
            models(&[(None, "m")], &["x", "y"], &[]).unwrap(),
            [["x", "y"]]
        );
        let two = [(Some("org/a"), "/m/a"), (None, "/m/b")];
        let named = models(&two, &[], &[("gpt", "b"), ("new", "gpt")]).unwrap();
        assert_eq!(named, [vec!["org/a"], vec!["b", "gpt", "new"]]);
        let spec = ModelSpec {
            names: vec!["org/a".to_owned()],
            path: "/m/a".into(),
        };
        assert_eq!(spec.worker_names(), ["org/a", "a"]);
    }

    #[test]
    fn ambiguous_names_are_refused() {
        let refused =
            |given: &[(Option<&str>, &str)], served: &[&str], aliases: &[(&str, &str)]| {
                models(given, served, aliases).unwrap_err().to_string()
            };
        let two = [(None, "/m/a"), (None, "/n/a")];
        assert!(refused(&two, &[], &[]).starts_with("\"a\" names two models"));
        let two = [(None, "/m/a"), (None, "/m/b")];
        assert!(refused(&two, &[], &[("b", "a")]).starts_with("\"b\" names two models"));
        assert!(refused(&two, &["x"], &[]).contains("there are 2: use --model NAME=PATH"));
        let unknown = refused(&two, &[], &[("x", "c")]);
        assert!(unknown.contains("\"c\"; there is a, b"), "{unknown}");
    }

    #[test]
    fn only_what_cannot_fit_is_refused() {
        let limit = TextLimit::new(&TestModel::new().text);
        // The longest token is <|eos|>, of 7 bytes.
        assert_eq!(limit.longest_token_bytes, 7);
        assert!(limit.check("prompt", &"x".repeat(10 * 7 * 4), 10).is_ok());
        let error = limit.check("prompt", &"x".repeat(10 * 7 * 4 + 1), 10);
        let text = error.unwrap_err().to_string();
        assert!(text.contains("281 bytes") && text.contains("10 tokens"));
    }
}
