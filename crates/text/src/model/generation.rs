//! What the folder says about generation: EOS ids, default sampling, context.

use serde_json::{Map, Value};

/// Sampling that the model's authors suggest; absent where they do not.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GenerationDefaults {
    pub temperature: Option<f32>,
    pub top_k: Option<u32>,
    pub top_p: Option<f32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
}

impl GenerationDefaults {
    pub(super) fn read(config: &Map<String, Value>) -> Self {
        #[allow(clippy::cast_possible_truncation)]
        let float = |key: &str| config.get(key).and_then(Value::as_f64).map(|x| x as f32);
        Self {
            temperature: float("temperature"),
            top_k: config
                .get("top_k")
                .and_then(Value::as_u64)
                .and_then(|k| u32::try_from(k).ok()),
            top_p: float("top_p"),
            min_p: float("min_p"),
            repetition_penalty: float("repetition_penalty"),
        }
    }
}

/// The union of the EOS ids of both files, in order of appearance.
pub(super) fn eos_token_ids(
    generation_config: &Map<String, Value>,
    config: &Map<String, Value>,
) -> Vec<u32> {
    let mut ids = Vec::new();
    let nested = config.get("text_config").and_then(Value::as_object);
    for object in [Some(generation_config), Some(config), nested] {
        let entry = object.and_then(|object| object.get("eos_token_id"));
        let list = match entry {
            Some(Value::Array(list)) => list.as_slice(),
            Some(single) => std::slice::from_ref(single),
            None => &[],
        };
        for id in list.iter().filter_map(Value::as_u64) {
            if let Ok(id) = u32::try_from(id)
                && !ids.contains(&id)
            {
                ids.push(id);
            }
        }
    }
    ids
}

/// The context length in tokens, under the names that architectures give it.
pub(super) fn max_context(config: &Map<String, Value>) -> Option<u32> {
    const NAMES: [&str; 5] = [
        "max_position_embeddings",
        "n_positions",
        "max_seq_len",
        "max_sequence_length",
        "seq_length",
    ];
    let nested = config.get("text_config").and_then(Value::as_object);
    [Some(config), nested]
        .into_iter()
        .flatten()
        .flat_map(|object| NAMES.iter().filter_map(|name| object.get(*name)))
        .find_map(|value| u32::try_from(value.as_u64()?).ok())
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, Value, json};

    use super::{GenerationDefaults, eos_token_ids, max_context};

    fn object(value: Value) -> Map<String, Value> {
        value.as_object().expect("an object").clone()
    }

    #[test]
    fn eos_ids_are_the_union_of_both_files() {
        let generation = object(json!({"eos_token_id": [5, 7]}));
        let config = object(json!({"eos_token_id": 2, "text_config": {"eos_token_id": [7, 9]}}));
        assert_eq!(eos_token_ids(&generation, &config), [5, 7, 2, 9]);
        let absent = object(json!({"eos_token_id": null}));
        assert!(eos_token_ids(&Map::new(), &absent).is_empty());
    }

    #[test]
    fn sampling_defaults_are_only_what_is_there() {
        let read = GenerationDefaults::read(&object(json!({"temperature": 0.5, "top_k": 20})));
        let expected = GenerationDefaults {
            temperature: Some(0.5),
            top_k: Some(20),
            ..GenerationDefaults::default()
        };
        assert_eq!(read, expected);
    }

    #[test]
    fn context_is_found_under_its_names() {
        assert_eq!(
            max_context(&object(json!({"max_position_embeddings": 8192}))),
            Some(8192)
        );
        assert_eq!(
            max_context(&object(json!({"text_config": {"n_positions": 64}}))),
            Some(64)
        );
        assert_eq!(max_context(&Map::new()), None);
    }
}
