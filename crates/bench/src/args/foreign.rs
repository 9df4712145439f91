//! Refuses options that would be ignored: a benchmark that did not do what was
//! asked for looks just like one that did.

use super::workload::{WorkloadArgs, WorkloadKind as Kind};
use crate::error::PlanError;

/// An option, and whether it was given.
type Given = (&'static str, bool);

/// Refuses the first of (option, whether it was given in vain, what has it).
pub(super) fn refuse_foreign(
    chosen: &str,
    options: &[(&'static str, bool, &'static str)],
) -> Result<(), PlanError> {
    match options.iter().find(|(_, is_foreign, _)| *is_foreign) {
        None => Ok(()),
        Some((option, _, belongs_to)) => Err(PlanError::Foreign {
            option,
            chosen: chosen.to_owned(),
            belongs_to,
        }),
    }
}

impl WorkloadArgs {
    /// Refuses options that the chosen workload does not have.
    pub(super) fn refuse_foreign(&self) -> Result<(), PlanError> {
        let kind = self.workload;
        let is_made_up = !matches!(kind, Kind::Trace | Kind::Prompts);
        let has_outputs = !matches!(kind, Kind::Trace | Kind::PrefillOnly);
        let made_up = [("input-tokens", self.input_tokens.is_some())];
        let outputs = [("output-tokens", self.output_tokens.is_some())];
        let both = [("lengths", self.lengths.is_some())];
        let ranges = [("range-ratio", self.range_ratio.is_some())];
        let decode = [("distinct-prompts", self.distinct_prompts.is_some())];
        let prefix = [
            ("prefix-tokens", self.prefix_tokens.is_some()),
            ("prefix-groups", self.prefix_groups.is_some()),
        ];
        let turns = [
            ("turns", self.turns.is_some()),
            ("turn-input-tokens", self.turn_input_tokens.is_some()),
            ("think-time-s", self.think_time_s.is_some()),
        ];
        let trace = [
            ("trace-file", self.trace_file.is_some()),
            ("trace-format", self.trace_format.is_some()),
            ("trace-block-tokens", self.trace_block_tokens.is_some()),
            ("trace-speed-up", self.trace_speed_up.is_some()),
            ("trace-from-s", self.trace_from_s.is_some()),
            ("trace-until-s", self.trace_until_s.is_some()),
            (
                "trace-max-input-tokens",
                self.trace_max_input_tokens.is_some(),
            ),
            (
                "trace-max-output-tokens",
                self.trace_max_output_tokens.is_some(),
            ),
        ];
        let prompts = [("prompts-file", self.prompts_file.is_some())];
        let groups: [(&[Given], bool, &'static str); 9] = [
            (&made_up, is_made_up, "made-up prompts"),
            (
                &outputs,
                has_outputs,
                "answers without a length of their own",
            ),
            (
                &both,
                is_made_up && has_outputs,
                "made-up prompts with answers",
            ),
            (&ranges, is_made_up && kind != Kind::Fixed, "random lengths"),
            (&decode, kind == Kind::DecodeOnly, "--workload decode-only"),
            (
                &prefix,
                kind == Kind::SharedPrefix,
                "--workload shared-prefix",
            ),
            (&turns, kind == Kind::MultiTurn, "--workload multi-turn"),
            (&trace, kind == Kind::Trace, "--workload trace"),
            (&prompts, kind == Kind::Prompts, "--workload prompts"),
        ];
        for (options, is_known, belongs_to) in groups {
            let foreign =
                |(option, is_given): &Given| (*option, *is_given && !is_known, belongs_to);
            let options: Vec<_> = options.iter().map(foreign).collect();
            refuse_foreign(&self.chosen(), &options)?;
        }
        Ok(())
    }
}
