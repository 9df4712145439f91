//! What `ModelText::load` makes of folders, and of chats that mean harm.

mod chats;
mod harm;
mod loading;
mod tokens;

use std::fs;
use std::path::{Path, PathBuf};

use chrono::{DateTime, NaiveDateTime};
use serde_json::json;
use tasuki_text::{ChatInput, ModelText};

fn small_model(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/text/models")
        .join(name)
}

/// A folder of its own that goes when the test ends.
struct Folder(PathBuf);

impl Folder {
    /// The byte-level model's tokenizer and these files.
    fn new(name: &str, files: &[(&str, &str)]) -> Self {
        let path = std::env::temp_dir().join(format!("tasuki-text-{}-{name}", std::process::id()));
        let folder = Self(path);
        fs::create_dir_all(&folder.0).expect("a folder");
        let tokenizer = small_model("byte_level").join("tokenizer.json");
        fs::copy(tokenizer, folder.0.join("tokenizer.json")).expect("a tokenizer");
        for (file, content) in files {
            let file = folder.0.join(file);
            fs::create_dir_all(file.parent().expect("a parent")).expect("a folder");
            fs::write(file, content).expect("a file");
        }
        folder
    }

    fn load(&self) -> ModelText {
        ModelText::load(&self.0).expect("the model loads")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn now() -> NaiveDateTime {
    DateTime::from_timestamp(1_700_000_000, 0)
        .expect("in range")
        .naive_utc()
}

fn hello() -> ChatInput<'static> {
    ChatInput::new(json!([{"role": "user", "content": "hi"}]), now())
}
