//! What starts a design: a command, or values for the Helm chart.

use std::fmt::Write;

use super::design::Design;

/// A design, and what all its workers are told.
pub struct Start {
    pub design: Design,
    /// How long a step that decodes may take with prompts in it; 0: there is no bound.
    pub itl_target_ms: f64,
    /// Options of workers that the plan was made with, where they were given.
    pub given: Vec<(&'static str, u32)>,
}

impl Start {
    /// The command line of `tasuki serve`. `model`: folder, hub id or alias, where it is known.
    pub fn command(&self, model: Option<&str>) -> String {
        let design = &self.design;
        let mut command = "tasuki serve".to_owned();
        if let Some(model) = model {
            let _ = write!(command, " --model {}", quoted(model));
        }
        for (part, role) in design.parts() {
            let _ = write!(command, " --{role} {}", part.workers);
            if part.tensor_parallel > 1 {
                let _ = write!(command, " --tp-{role} {}", part.tensor_parallel);
            }
        }
        if design.strict_roles {
            command += " --strict-roles";
        }
        for word in self.options(design.max_batched_tokens) {
            let _ = write!(command, " {word}");
        }
        if let Some(tokens) = design.prefill_max_batched_tokens {
            let _ = write!(command, " --prefill-option max-batched-tokens={tokens}");
        }
        command
    }

    /// Values for `deploy/helm/tasuki` in YAML: pools, and what the design says of routers and
    /// workers. `on_gpus`: workers have GPUs.
    pub fn values(&self, on_gpus: bool) -> String {
        let design = &self.design;
        let mut text = format!(
            "# The design of `tasuki plan`: {}. The model and the images are not in it:\n\
             # docs/kubernetes.md.\n",
            design.name()
        );
        if design.strict_roles {
            text += "router:\n  args: [\"--strict-roles\"]\n";
        }
        let args = |tokens: u32| {
            let words = self.options(tokens).into_iter();
            let words: Vec<String> = words.map(|word| format!("\"{word}\"")).collect();
            format!("args: [{}]", words.join(", "))
        };
        let all = args(design.max_batched_tokens);
        let _ = writeln!(text, "worker:\n  {all}\npools:");
        for role in ["prefill", "decode", "mixed"] {
            match design.parts().find(|(_, known)| *known == role) {
                Some((part, _)) => {
                    let _ = writeln!(
                        text,
                        "  {role}:\n    role: {role}\n    replicas: {}",
                        part.workers
                    );
                    if on_gpus {
                        let _ = writeln!(text, "    gpus: {}", part.tensor_parallel);
                    }
                    let own_steps = design.prefill_max_batched_tokens;
                    if let Some(tokens) = own_steps.filter(|_| role == "prefill") {
                        // They replace those of `worker`.
                        let _ = writeln!(text, "    {}", args(tokens));
                    }
                }
                // The chart has these two unless it is told otherwise.
                None if role != "mixed" => {
                    let _ = writeln!(text, "  {role}: null");
                }
                None => {}
            }
        }
        text
    }

    /// Of workers with steps of so many tokens.
    fn options(&self, max_batched_tokens: u32) -> Vec<String> {
        let steps = [
            ("--max-batched-tokens", max_batched_tokens.to_string()),
            ("--itl-target-ms", decimal(self.itl_target_ms)),
        ];
        let given = self.given.iter();
        let given = given.map(|(option, value)| (*option, value.to_string()));
        let all = steps.into_iter().chain(given);
        all.flat_map(|(option, value)| [option.to_owned(), value])
            .collect()
    }
}

/// A number without zeros at its end.
pub fn decimal(number: f64) -> String {
    ((1e3 * number).round() / 1e3).to_string()
}

/// As a word of a shell.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:@+=~".contains(c);
    match word.chars().all(plain) && !word.is_empty() {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::design::all;
    use super::*;

    fn design(gpus: u32, name: &str) -> Design {
        let designs = all(gpus, &[1, 2], 1_024).into_iter();
        let designs = designs.flat_map(|soft| [Some(soft), soft.strict()]);
        let mut named = designs.flatten().filter(|d| d.name() == name);
        named.next().expect("a design of that name")
    }

    fn start(design: Design) -> Start {
        Start {
            design,
            itl_target_ms: 12.0 * 0.8,
            given: vec![("--block-size", 16)],
        }
    }

    #[test]
    fn the_command_says_the_model_the_roles_and_their_degrees() {
        let split = design(3, "1 prefill + 1 decode x2, strict");
        let wanted = "tasuki serve --prefill 1 --decode 1 --tp-decode 2 --strict-roles \
                      --max-batched-tokens 1024 --itl-target-ms 9.6 --block-size 16";
        assert_eq!(start(split).command(None), wanted);
        let sized = split.sized(1_024, Some(8_192));
        let wanted = format!("{wanted} --prefill-option max-batched-tokens=8192");
        assert_eq!(start(sized).command(None), wanted);
        let mixed = design(2, "2 mixed");
        let wanted = "tasuki serve --model '/my models/it'\\''s' --mixed 2 \
                      --max-batched-tokens 1024 --itl-target-ms 9.6 --block-size 16";
        assert_eq!(start(mixed).command(Some("/my models/it's")), wanted);
    }

    #[test]
    fn values_have_the_pools_of_the_design_and_no_others() {
        let mixed = start(design(2, "2 mixed")).values(false);
        let pools =
            "pools:\n  prefill: null\n  decode: null\n  mixed:\n    role: mixed\n    replicas: 2\n";
        assert!(mixed.ends_with(pools), "{mixed}");
        let options = "  args: [\"--max-batched-tokens\", \"1024\", \"--itl-target-ms\", \"9.6\", \
                       \"--block-size\", \"16\"]\n";
        assert!(mixed.contains(options), "{mixed}");
        let split = start(design(3, "1 prefill + 1 decode x2, strict")).values(true);
        let decode = "  decode:\n    role: decode\n    replicas: 1\n    gpus: 2\n";
        assert!(split.ends_with(decode), "{split}");
        assert!(split.contains("args: [\"--strict-roles\"]"), "{split}");
        let sized = design(3, "1 prefill + 1 decode x2, strict").sized(1_024, Some(8_192));
        let sized = start(sized).values(true);
        let prefill = "  prefill:\n    role: prefill\n    replicas: 1\n    gpus: 1\n    \
                       args: [\"--max-batched-tokens\", \"8192\", \"--itl-target-ms\", \"9.6\", \
                       \"--block-size\", \"16\"]\n  decode:\n";
        assert!(sized.contains(prefill), "{sized}");
    }
}
