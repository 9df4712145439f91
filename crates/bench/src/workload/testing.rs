//! What the tests of workloads have in common: a small model's token ids.

use std::io::Write;
use std::path::Path;

use tasuki_text::ModelText;

use super::Making;
use crate::plan::{Api, Planned, Prompt, Workload};
use crate::tokens::PromptMaker;

/// Requests made of token ids.
pub fn making(requests: usize, seed: u64) -> Making {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/text/models/byte_level");
    let model = ModelText::load(&path).expect("the model loads");
    let maker = PromptMaker::tokens(Api::Completions, model, &path, seed).expect("a maker");
    Making {
        maker,
        seed,
        requests,
        exact_output: true,
    }
}

/// All requests that wait for nobody.
pub fn all(workload: &mut dyn Workload) -> Vec<Planned> {
    std::iter::from_fn(|| workload.next()).collect()
}

pub fn ids(planned: &Planned) -> &[u32] {
    match &planned.prompt {
        Prompt::Tokens(tokens) => tokens,
        other => panic!("not token ids: {other:?}"),
    }
}

/// How many tokens two prompts have in common from the start.
pub fn shared(a: &Planned, b: &Planned) -> usize {
    let pairs = ids(a).iter().zip(ids(b));
    pairs.take_while(|(a, b)| a == b).count()
}

/// A file that goes when the test ends.
pub fn file(content: &str) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().expect("a file");
    file.write_all(content.as_bytes()).expect("it is written");
    file
}
