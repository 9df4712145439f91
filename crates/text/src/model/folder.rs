//! Reads the JSON and Jinja files of a Hugging Face folder.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::TextError;

/// Upper bound for one file; the largest tokenizers are about 40 MB.
const MAX_FILE_BYTES: u64 = 256 << 20;

/// The files of a folder that concern text, as they are.
#[derive(Debug)]
pub(super) struct Folder {
    pub path: PathBuf,
    pub tokenizer: Vec<u8>,
    pub tokenizer_config: Map<String, Value>,
    pub special_tokens_map: Map<String, Value>,
    pub added_tokens: Map<String, Value>,
    pub config: Map<String, Value>,
    pub generation_config: Map<String, Value>,
    /// By name; "default" is the one without a name.
    pub templates: BTreeMap<String, String>,
}

impl Folder {
    /// Reads what is there; only `tokenizer.json` must be.
    pub fn read(path: &Path) -> Result<Self, TextError> {
        if !path.is_dir() {
            return Err(TextError::NoFolder(path.to_owned()));
        }
        let tokenizer = read(&path.join("tokenizer.json"))?
            .ok_or_else(|| TextError::NoTokenizer(path.to_owned()))?;
        let tokenizer_config = read_object(&path.join("tokenizer_config.json"))?;
        let templates = match template_files(path)? {
            files if files.is_empty() => configured_templates(path, &tokenizer_config)?,
            files => files,
        };
        Ok(Self {
            path: path.to_owned(),
            tokenizer,
            tokenizer_config,
            special_tokens_map: read_object(&path.join("special_tokens_map.json"))?,
            added_tokens: read_object(&path.join("added_tokens.json"))?,
            config: read_object(&path.join("config.json"))?,
            generation_config: read_object(&path.join("generation_config.json"))?,
            templates,
        })
    }
}

pub(super) fn bad_file(path: &Path, reason: impl ToString) -> TextError {
    TextError::BadFile {
        path: path.to_owned(),
        reason: reason.to_string(),
    }
}

/// `chat_template.jinja` and `additional_chat_templates/*.jinja`; they win over
/// what `tokenizer_config.json` says.
fn template_files(path: &Path) -> Result<BTreeMap<String, String>, TextError> {
    let mut templates = BTreeMap::new();
    if let Some(text) = read_text(&path.join("chat_template.jinja"))? {
        templates.insert("default".to_owned(), text);
    }
    let folder = path.join("additional_chat_templates");
    let entries = match fs::read_dir(&folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(templates),
        Err(error) => return Err(bad_file(&folder, error)),
    };
    for entry in entries {
        let file = entry.map_err(|error| bad_file(&folder, error))?.path();
        let name = match (file.extension(), file.file_stem()) {
            (Some(extension), Some(stem)) if extension == "jinja" => stem.to_string_lossy(),
            _ => continue,
        };
        if let Some(text) = read_text(&file)? {
            templates.insert(name.into_owned(), text);
        }
    }
    Ok(templates)
}

/// `chat_template` of `tokenizer_config.json`: a string, or a list of named ones.
fn configured_templates(
    path: &Path,
    config: &Map<String, Value>,
) -> Result<BTreeMap<String, String>, TextError> {
    let unusable = || {
        bad_file(
            &path.join("tokenizer_config.json"),
            "chat_template is neither a string nor a list of {name, template}",
        )
    };
    let mut templates = BTreeMap::new();
    match config.get("chat_template") {
        None | Some(Value::Null) => {}
        Some(Value::String(text)) => {
            templates.insert("default".to_owned(), text.clone());
        }
        Some(Value::Array(list)) => {
            for entry in list {
                let part = |key| entry.get(key).and_then(Value::as_str).map(str::to_owned);
                let (Some(name), Some(text)) = (part("name"), part("template")) else {
                    return Err(unusable());
                };
                templates.insert(name, text);
            }
        }
        Some(_) => return Err(unusable()),
    }
    Ok(templates)
}

fn read(path: &Path) -> Result<Option<Vec<u8>>, TextError> {
    match fs::metadata(path) {
        Ok(data) if data.len() > MAX_FILE_BYTES => {
            let reason = format!("{} bytes, at most {MAX_FILE_BYTES} are read", data.len());
            return Err(bad_file(path, reason));
        }
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(bad_file(path, error)),
    }
    fs::read(path)
        .map(Some)
        .map_err(|error| bad_file(path, error))
}

fn read_text(path: &Path) -> Result<Option<String>, TextError> {
    read(path)?
        .map(|bytes| String::from_utf8(bytes).map_err(|error| bad_file(path, error)))
        .transpose()
}

fn read_object(path: &Path) -> Result<Map<String, Value>, TextError> {
    let Some(bytes) = read(path)? else {
        return Ok(Map::new());
    };
    match serde_json::from_slice(&bytes) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(_) => Err(bad_file(path, "not a JSON object")),
        Err(error) => Err(bad_file(path, error)),
    }
}
