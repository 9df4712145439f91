//! What can go wrong between text and tokens, and whose fault it is.

use std::path::PathBuf;

/// Errors of the text layer.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// There is no such folder.
    #[error("there is no folder {}: correct the path", .0.display())]
    NoFolder(PathBuf),
    /// The folder has no `tokenizer.json`.
    #[error(
        "{} has no tokenizer.json; save the tokenizer with transformers' \
         AutoTokenizer.from_pretrained(...).save_pretrained(...)",
        .0.display()
    )]
    NoTokenizer(PathBuf),
    /// A file of the folder cannot be read or parsed.
    #[error("cannot use {}: {reason}", .path.display())]
    BadFile { path: PathBuf, reason: String },
    /// The tokenizer failed on this text.
    #[error("cannot tokenize: {0}")]
    Encode(#[source] tokenizers::Error),
    /// The tokenizer failed on these ids.
    #[error("cannot detokenize: {0}")]
    Decode(#[source] tokenizers::Error),
    /// Chat was asked of a model without a chat template.
    #[error("{0}")]
    NoTemplate(String),
    /// The chat template does not compile. `line` is 1-based.
    #[error("the chat template is invalid at line {line}: {reason}")]
    BadTemplate { line: usize, reason: String },
    /// The template itself refused the chat with `raise_exception`.
    #[error("{0}")]
    Raised(String),
    /// The chat is not of the shape that a template can take.
    #[error("{message}")]
    BadChat {
        /// The field of a request that is at fault.
        field: &'static str,
        message: String,
    },
    /// The template failed on this chat.
    #[error("the chat template failed on this chat: {0}")]
    Render(String),
}

impl TextError {
    pub(crate) fn bad_chat(field: &'static str, message: impl Into<String>) -> Self {
        Self::BadChat {
            field,
            message: message.into(),
        }
    }

    /// The field of a request that is at fault, where it is known.
    #[must_use]
    pub fn field(&self) -> Option<&'static str> {
        match self {
            Self::BadChat { field, .. } => Some(field),
            _ => None,
        }
    }

    /// Whether the request is to blame (400), not the model's folder (500).
    #[must_use]
    pub fn is_client_fault(&self) -> bool {
        match self {
            Self::NoFolder(_) | Self::NoTokenizer(_) | Self::BadFile { .. } => false,
            Self::Encode(_)
            | Self::Decode(_)
            | Self::NoTemplate(_)
            | Self::BadTemplate { .. }
            | Self::Raised(_)
            | Self::BadChat { .. }
            | Self::Render(_) => true,
        }
    }
}
