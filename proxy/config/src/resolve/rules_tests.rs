//! Tests the conversion of `request` to rules for the gateway.

use serde_json::json;
use warden_gateway::SystemMode;

use super::*;
use crate::machine::HostMachine;
use crate::resolve::resolve_config;
use crate::source::layers::{ConfigSources, load_config};

fn rules(text: &str) -> Result<Vec<ModelRules>, String> {
    let dir = tempfile::tempdir().unwrap();
    let (file, model) = (dir.path().join("warden.toml"), dir.path().join("m.gguf"));
    std::fs::write(&model, "GGUF").unwrap();
    let model = format!("model = {:?}", model.to_str().unwrap());
    std::fs::write(&file, text.replace("FILE", &model)).unwrap();
    let machine = HostMachine::read();
    let loaded = load_config(ConfigSources { file: Some(file), ..ConfigSources::default() });
    let resolved = loaded.and_then(|loaded| resolve_config(&loaded, &machine, false));
    let told = |problems: crate::problem::ConfigProblems| {
        let told = problems
            .0
            .iter()
            .map(|problem| format!("{problem} | {}", problem.hint.clone().unwrap_or_default()));
        told.collect::<Vec<_>>().join("\n")
    };
    resolved
        .map(|resolved| resolved.models.iter().map(|model| (*model.rules).clone()).collect())
        .map_err(told)
}

#[test]
fn a_model_has_its_own_rules_over_those_for_all_models() {
    let all = rules(
        "[defaults.request]\nset = { seed = 7, temperature = 0.5 }\nstrip = [\"user\"]\nmax_tokens = 4096\n\
         [models.a]\nFILE\n\
         [models.\"org/b\"]\nFILE\nupstream_model = \"b\"\n[models.\"org/b\".request]\nset.seed = 8\nmax_tokens = 10\n\
         default.chat_template_kwargs = { enable_thinking = false, list = [1, \"x\", 2.0] }\n\
         system_prompt = \"Be brief.\"\nsystem_prompt_mode = \"prepend\"\nstrip = []\nfresh_seed = true\n",
    )
    .unwrap();
    let set = |seed: u64| vec![("seed".to_owned(), json!(seed)), ("temperature".to_owned(), json!(0.5))];
    let request = RequestRules {
        set: set(7),
        strip: vec!["user".to_owned()],
        max_tokens: Some(4096),
        ..RequestRules::default()
    };
    assert_eq!(all[0], ModelRules { request, ..ModelRules::default() });
    let request = RequestRules {
        set: set(8),
        default: vec![(
            "chat_template_kwargs".to_owned(),
            json!({ "enable_thinking": false, "list": [1, "x", 2.0] }),
        )],
        max_tokens: Some(10),
        system_prompt: Some(SystemPrompt { text: "Be brief.".to_owned(), mode: SystemMode::Prepend }),
        strip: Vec::new(),
        fresh_seed: true,
    };
    assert_eq!(all[1], ModelRules { request, upstream_model: Some("b".to_owned()), ..ModelRules::default() });
    assert!(rules("[models.a]\nFILE\n").unwrap()[0].is_empty());
}

#[test]
fn rules_that_would_answer_another_request_are_refused_with_their_line() {
    let wrong = [
        "set.model = \"x\"",
        "default.stream = true",
        "strip = [\"x\", \"model\"]",
        "system_prompt = \"x\"\nset.messages = []",
        "system_prompt = \"\"",
        "max_tokens = 0",
        "system_prompt_mode = \"both\"",
        "set.day = 2026-01-01",
        "set.x = { y = [inf] }",
        "strip = \"x\"",
        "maxtokens = 5",
    ];
    let file = |text: &str| rules(text).unwrap_err();
    let told = wrong.map(|text| file(&format!("[models.\"a/b\"]\nFILE\n[models.\"a/b\".request]\n{text}\n")));
    let told = told.join("\n") + "\n" + &file("[models.a]\nFILE\nupstream_model = \"\"\n");
    let line = |line: &str| line[line.find("warden.toml:").unwrap_or_default()..].to_owned() + "\n";
    insta::assert_snapshot!(told.lines().map(line).collect::<String>());
}
