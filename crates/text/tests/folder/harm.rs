//! Templates that mean harm end in errors.

use tasuki_text::{ModelText, TextError};

use super::{hello, small_model};

fn with_template(template: &str) -> Result<String, TextError> {
    let model = ModelText::load(&small_model("byte_level")).expect("the model loads");
    let mut input = hello();
    input.chat_template_override = Some(template);
    model.render_chat(input)
}

#[test]
fn a_template_cannot_run_forever() {
    let endless = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}";
    let error = with_template(endless).expect_err("stopped");
    assert!(error.to_string().contains("steps"), "{error}");
}

#[test]
fn recursion_and_nesting_end_in_errors() {
    let macros = "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}";
    assert!(with_template(macros).is_err());
    let nested = "{% set ns = namespace(x=[]) %}{% for _ in range(2000) %}\
                  {% set ns.x = [ns.x] %}{% endfor %}";
    for print in ["{{ ns.x }}", "{{ ns.x | tojson }}", "{{ ns.x | string }}"] {
        assert!(
            with_template(&format!("{nested}{print}")).is_err(),
            "{print}"
        );
    }
    let deep = nested.replace("2000", "90000");
    for rest in ["", "{{ ns.x == 1 }}", "{{ ns.x == [ns.x] }}"] {
        let _ = with_template(&format!("{deep}{rest}"));
    }
    let parens = format!("{{{{ {}1{} }}}}", "(".repeat(5000), ")".repeat(5000));
    assert!(matches!(
        with_template(&parens),
        Err(TextError::BadTemplate { .. })
    ));
}

#[test]
fn wild_arguments_end_in_errors_not_in_panics() {
    for expression in [
        "'x' * 99999999999",
        "'x'.center(99999999999)",
        "[] | tojson(indent=99999999999)",
        "range(99999999999)",
        "9 is divisibleby(0)",
        "(-9223372036854775808) // -1 ~ 1 % 0",
        "'x'.zfill(-1) ~ 'é'.find('é', -9223372036854775807) ~ none.x.y",
        "'é'[0:9223372036854775807:9223372036854775807] ~ missing.x",
        "'abc'[1:2:-1] ~ missing.x",
        "'{:>99999999999}'.format('x')",
        "'%99999999999d' | format(1)",
        "'%*d' | format(99999999999, 1)",
        "'a\\nb' | indent(99999999999)",
        "[1] | batch(99999999999, 0) | list",
        "[1] | slice(count=99999999999) | list",
        "strftime_now(5)",
    ] {
        let result = with_template(&format!("{{{{ {expression} }}}}"));
        assert!(
            matches!(result, Err(TextError::Render(_))),
            "{expression}: {result:?}"
        );
    }
}
