//! The prompts of a completion request, as tokens.

use super::types::PromptField;
use super::validate::{MAX_CHOICES, MAX_PROMPTS, count, token_ids};
use crate::error::ApiError;
use crate::models::Model;
use crate::openai::chat::conversation::text_error;
use crate::serve::api::ModelLimits;

/// One prompt.
#[derive(Debug, PartialEq, Eq)]
pub struct Prompt {
    pub tokens: Vec<u32>,
    /// As the client wrote it, if it was text.
    pub given: Option<String>,
}

/// All prompts of a request, in order, from the field of this name.
///
/// # Errors
/// `Invalid` for none, too many, or token ids outside the vocabulary.
pub fn prompts(
    model: &Model,
    name: &str,
    field: Option<PromptField>,
    add_special_tokens: bool,
    limits: &ModelLimits,
) -> Result<Vec<Prompt>, ApiError> {
    let encode = |given: String| -> Result<Prompt, ApiError> {
        model.text_limit.check(name, &given, limits.max_model_len)?;
        let tokens = model
            .text
            .encode(&given, add_special_tokens)
            .map_err(|error| text_error(name, &error))?;
        Ok(Prompt {
            tokens,
            given: Some(given),
        })
    };
    let check = |ids: &[i64]| -> Result<Prompt, ApiError> {
        Ok(Prompt {
            tokens: token_ids(name, ids, limits.vocab_size)?,
            given: None,
        })
    };
    let limited = |found| count(name, found, MAX_PROMPTS);
    let prompts: Vec<Prompt> = match field {
        None => return Err(ApiError::invalid(name, format!("{name} is missing."))),
        Some(PromptField::Text(given)) => vec![encode(given)?],
        Some(PromptField::Tokens(ids)) => vec![check(&ids)?],
        Some(PromptField::Texts(given)) => {
            limited(given.len())?;
            given
                .into_iter()
                .map(encode)
                .collect::<Result<_, ApiError>>()?
        }
        Some(PromptField::TokenLists(lists)) => {
            limited(lists.len())?;
            lists
                .iter()
                .map(|ids| check(ids))
                .collect::<Result<_, ApiError>>()?
        }
    };
    if prompts.is_empty() {
        return Err(ApiError::invalid(
            name,
            format!("{name} has 0 items; at least 1 is needed."),
        ));
    }
    Ok(prompts)
}

/// # Errors
/// Prompts times choices beyond the limit.
pub fn refuse_too_many(prompts: usize, n: u32) -> Result<(), ApiError> {
    let choices = prompts * n as usize;
    if choices <= MAX_CHOICES {
        return Ok(());
    }
    Err(ApiError::invalid(
        "n",
        format!(
            "{prompts} prompts with n of {n} make {choices} choices; the limit is {}.",
            MAX_CHOICES
        ),
    ))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::testing::{FakeGenerator, app, tokens_of};

    fn parsed(json: &str) -> Result<Vec<Prompt>, ApiError> {
        let app = app(Arc::new(FakeGenerator::saying("")));
        let field = serde_json::from_str(json).unwrap();
        let (_, model) = app.models.find(None)?;
        prompts(&model, "prompt", field, true, &app.limits(&model)?)
    }

    #[test]
    fn all_forms_become_tokens() {
        let tokens = |json| -> Vec<Vec<u32>> {
            parsed(json)
                .unwrap()
                .into_iter()
                .map(|p| p.tokens)
                .collect()
        };
        assert_eq!(tokens(r#""ab""#), [tokens_of("ab")]);
        assert_eq!(tokens(r#"["a","b"]"#), [tokens_of("a"), tokens_of("b")]);
        assert_eq!(tokens("[1,2]"), [[1, 2]]);
        assert_eq!(tokens("[[1],[2]]"), [[1], [2]]);
    }

    #[test]
    fn nothing_and_too_much_are_refused() {
        let message = |json: &str| parsed(json).unwrap_err().to_string();
        assert_eq!(message("null"), "prompt is missing.");
        assert!(message("[]").contains("0 items"));
        assert!(message("[[999999]]").contains("999999"));
        let many = serde_json::to_string(&vec!["x"; 1025]).unwrap();
        assert_eq!(message(&many), "prompt has 1025 items; the limit is 1024.");
    }
}
