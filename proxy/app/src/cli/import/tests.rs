//! Imports a sample of each source and faulty inputs, and checks that the results are valid configurations.

use std::fs;
use std::path::Path;

use warden_config::source::layers::{ConfigSources, load_config};

use super::imported::{ImportedCommand, ImportedModel};
use super::*;

pub(super) const SWAP: &str = include_str!("samples/llama-swap.yaml");
pub(super) const PRESET: &str = include_str!("samples/preset.ini");
pub(super) const DOCKER: &str = "docker run --rm -it --gpus '\"device=0,1\"' -v /srv/models:/models:ro -v cache:/var/cache \\\n  \
    -e LLAMA_ARG_CTX_SIZE=8192 -p 127.0.0.1:9000:8080 --memory 8g llama.cpp:server-cuda \\\n  \
    -m /models/a.gguf --host 0.0.0.0 --port 8080 --alias chat,default --api-key sk-12345678";

pub(super) fn env(name: &str) -> Option<String> {
    (name == "HOME").then(|| "/home/a".to_owned())
}

fn swap(text: &str) -> Result<ImportedConfig, CommandError> {
    let imported = llama_swap::import_llama_swap(text, "swap.yaml", &env)?;
    imported.check_names("swap.yaml").map(|()| imported)
}

fn docker() -> ImportedConfig {
    command::import_command(&shell::split_words(DOCKER, "run.sh").unwrap(), "run.sh").unwrap()
}

fn told<T: std::fmt::Debug>(result: Result<T, CommandError>) -> String {
    let failure = result.unwrap_err();
    assert_eq!(failure.code(), 2, "{failure}");
    failure.lines().join("\n")
}

/// Loads the written configuration like `serve`.
fn read_back(imported: &ImportedConfig) -> warden_config::source::layers::LoadedConfig {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("warden.toml");
    fs::write(&file, write::render_config(imported, "x")).unwrap();
    load_config(ConfigSources { file: Some(file), ..ConfigSources::default() }).unwrap()
}

/// A directory of Ollama, with a model that uses every feature.
fn ollama_dir(dir: &Path) {
    let manifests = dir.join("manifests/registry.example/library/gemma");
    fs::create_dir_all(&manifests).unwrap();
    fs::create_dir_all(dir.join("blobs")).unwrap();
    let layers = [
        ("model", "GGUF"),
        ("projector", "GGUF"),
        ("adapter", "GGUF"),
        ("template", "{{ .Prompt }}"),
        ("system", "You are brief.\nVery brief."),
        ("license", "free"),
        (
            "params",
            r#"{"num_ctx": 8192, "stop": ["<end>"], "temperature": 0.5, "num_predict": -1, "penalize_newline": true}"#,
        ),
    ];
    let list: Vec<String> = layers
        .iter()
        .map(|(kind, content)| {
            fs::write(dir.join("blobs").join(format!("sha256-{kind}")), content).unwrap();
            format!(r#"{{"mediaType": "application/vnd.ollama.image.{kind}", "digest": "sha256:{kind}"}}"#)
        })
        .collect();
    fs::write(manifests.join("latest"), format!(r#"{{"layers": [{}]}}"#, list.join(","))).unwrap();
}

fn ollama() -> (tempfile::TempDir, ImportedConfig) {
    let dir = tempfile::tempdir().unwrap();
    ollama_dir(dir.path());
    let imported = ollama::import_ollama(&ollama::models_folder(Some(dir.path()), &env).unwrap()).unwrap();
    (dir, imported)
}

#[test]
fn a_configuration_of_llama_swap_is_written_with_what_has_no_equal() {
    insta::assert_snapshot!(write::render_config(&swap(SWAP).unwrap(), "swap.yaml"));
}

#[test]
fn presets_of_a_router_are_written_as_models() {
    insta::assert_snapshot!(write::render_config(
        &preset::import_preset(PRESET, "preset.ini").unwrap(),
        "preset.ini"
    ));
}

#[test]
fn the_models_of_ollama_are_written_with_their_files() {
    let (dir, imported) = ollama();
    let text = write::render_config(&imported, "ollama");
    insta::assert_snapshot!(text.replace(&dir.path().display().to_string(), "/ollama"));
}

#[test]
fn a_container_becomes_a_process_with_the_hosts_paths() {
    insta::assert_snapshot!(write::render_config(&docker(), "run.sh"));
}

#[test]
fn what_is_written_is_a_configuration_of_ours() {
    let loaded = read_back(&swap(SWAP).unwrap());
    let names: Vec<&str> = loaded.models.iter().map(|(name, ..)| name.as_str()).collect();
    assert_eq!(names, ["qwen 3 \"big\"", "small.model", "embed", "pictures"]);
    assert_eq!(loaded.models[3].1.command, ["/opt/sd-server", "--listen-port", "${PORT}"]);
    let (_, small) = &loaded.models[1];
    assert_eq!(small.request.strip, ["temperature", "top_k"]);
    assert_eq!(small.request.set["chat_template_kwargs"]["reasoning"], false);
    assert_eq!(small.max_in_flight, Some(3));
    assert_eq!(read_back(&preset::import_preset(PRESET, "p").unwrap()).models.len(), 4);
    let (_dir, imported) = ollama();
    let loaded = read_back(&imported);
    assert_eq!(loaded.models[0].1.request.system_prompt.as_deref(), Some("You are brief.\nVery brief."));
    let loaded = read_back(&docker());
    assert_eq!((loaded.settings.server.host.as_str(), loaded.settings.server.port), ("127.0.0.1", 9000));
    assert_eq!(loaded.models[0].1.model.as_deref(), Some(Path::new("/srv/models/a.gguf")));
}

#[test]
fn wrong_input_is_told_with_its_place_and_a_cure() {
    let model = |cmd: &str| format!("models:\n  a:\n    cmd: {cmd}\n");
    let mut all: Vec<String> = [
        "models:\n\ta: 1\n".to_owned(),
        "models: [1\n".to_owned(),
        "services:\n  a: 1\n".to_owned(),
        "models:\n  a:\n    cmd: llama-server\n  a:\n    cmd: llama-server\n".to_owned(),
        format!("macros:\n  x: ${{y}}\n  y: ${{x}}\n{}", model("llama-server ${x}")),
        model("llama-server ${nothing}"),
        model("llama-server ${env.NOTHING}"),
        model("|\n      llama-server\n      -m \"a b.gguf"),
        model("''"),
        format!("{}    env: [secret]\n", model("llama-server -m a")),
        format!("{}    aliases: [b, b]\n", model("llama-server -m a")),
        format!("{}groups:\n  g: {{members: [a]}}\n  h: {{members: [a]}}\n", model("llama-server -m a")),
    ]
    .iter()
    .map(|text| told(swap(text)))
    .collect();
    for text in ["[a]\nctx-size\n", "[a\n", "[a]\nmmap = maybe\n", "[a]\n[a]\n", "[a]\nstop-timeout = soon\n"]
    {
        all.push(told(preset::import_preset(text, "preset.ini")));
    }
    for line in [
        "python -m vllm",
        "docker ps",
        "docker run --rm",
        "docker run -v",
        "llama-server -m a | tee log",
        "docker run nginx",
        "",
    ] {
        all.push(told(command::import_command(&shell::split_words(line, "run.sh").unwrap(), "run.sh")));
    }
    insta::assert_snapshot!(all.join("\n"));
}

#[test]
fn a_missing_blob_and_a_folder_without_models_are_told() {
    let (dir, _) = ollama();
    fs::remove_file(dir.path().join("blobs/sha256-model")).unwrap();
    let text = told(ollama::import_ollama(dir.path()));
    assert!(
        text.contains("blobs/sha256-model is missing") && text.contains("ollama pull gemma:latest"),
        "{text}"
    );
    let text = told(ollama::models_folder(Some(&dir.path().join("blobs")), &env));
    assert!(text.contains("there are no models of Ollama in"), "{text}");
    fs::write(dir.path().join("manifests/registry.example/library/gemma/latest"), "{").unwrap();
    assert!(told(ollama::import_ollama(dir.path())).contains("line 1: this is no manifest"));
}

#[test]
fn models_that_drive_each_other_out_do_so_here() {
    let four = "models:\n  a: {cmd: llama-server -m a}\n  b: {cmd: llama-server -m b, ttl: 0}\n  \
                c: {cmd: llama-server -m c}\n  d: {cmd: llama-server -m d}\nglobalTTL: 90\n";
    // Each model with its groups and its pin, and the unsupported settings.
    let of = |groups: &str| {
        let imported = swap(&format!("{four}{groups}")).unwrap();
        assert_eq!((imported.models[0].loading.ttl, imported.models[1].loading.ttl), (Some(90), None));
        let models = imported.models.iter().map(|model| {
            let pin = if model.loading.pin { " pinned" } else { "" };
            format!("{}: {}{pin}", model.name, model.loading.groups.join(" "))
        });
        let left = imported.unmatched.iter().map(|left| format!("! {}", left.setting));
        let most = imported.max_loaded.map(|most| format!("{most} at a time"));
        models.chain(left).chain(most).collect::<Vec<_>>().join("\n")
    };
    let all = [
        "",
        "groups:\n  g: {swap: false, exclusive: false, persistent: true, members: [a, e]}\n",
        "groups:\n  g: {members: [a, b], size: 2}\nhooks: {on_startup: {preload: [b], warm: 1}}\n",
        "groups:\n  g: {members: [a, b]}\n  h: {members: [c, d], exclusive: false}\n",
        "groups:\n  g: {members: [a, b], exclusive: false}\n  h: {members: [c], exclusive: false}\n",
        "groups:\n  g: {members: [a, b], swap: false}\n  h: {members: [c, d]}\n",
        "groups:\n  g: {members: [a]}\n  h: {members: [c, d], persistent: true, exclusive: false}\n",
        "groups:\n  g: {members: [a]}\n  h: {members: [c, d], persistent: true}\n",
        "matrix:\n  vars: {x: a}\n  sets: {s: \"(x | b) & c\"}\n",
        "routing: {router: {use: matrix, settings: {matrix: {sets: {s: \"a & b\", t: \"b & c\", u: \"a & c\"}, evict_costs: {a: 5}}}}}\n",
        "matrix:\n  sets: {s: \"a & & c\"}\n",
    ];
    insta::assert_snapshot!(all.map(|groups| format!("{groups}{}", of(groups))).join("\n---\n"));
}

#[test]
fn what_is_put_before_a_server_stays_before_it() {
    let taken = |line: &str| {
        let taken = command::parse_command(&shell::split_words(line, "x").unwrap())?;
        let ImportedModel { command, model, .. } = taken.model;
        let ImportedCommand { wrapper, binary, env, args, directory, .. } = command;
        assert_eq!((args.join(" ").as_str(), model.as_deref()), ("-c 1", Some("/a.gguf")), "{line}");
        let env: Vec<String> = env.iter().map(|(name, value)| format!("{name}={value} ")).collect();
        let env = env.concat();
        let directory = directory.map(|folder| format!("in {folder}: ")).unwrap_or_default();
        Ok::<_, String>(format!("{directory}{env}{wrapper:?} {}", binary.unwrap_or_default()))
    };
    let lines = [
        "taskset -c 0-1 SERVER",
        "nice -n 5 SERVER",
        "numactl -m 0 -N 0 /opt/SERVER",
        "env -u LD_LIBRARY_PATH CUDA_VISIBLE_DEVICES=0 SERVER",
        "/usr/bin/env A=1 SERVER",
        "env -i A=1 SERVER",
        "nice -n 5 env A=1 ionice -c 3 SERVER",
        "systemd-run --user --scope --unit llama-server-one -p MemoryMax=8G SERVER",
        "systemd-run --user SERVER",
        "toolbox run -c llama SERVER",
        "distrobox enter llama -- /usr/local/bin/SERVER",
        "sudo -u ai SERVER",
        "nice sudo SERVER",
        "ssh host SERVER",
        "llama serve -c 1 -m /a.gguf",
        "nice /opt/llama server -c 1 -m /a.gguf",
        "nohup /opt/ik-SERVER",
        "taskset -c 0 ./run.sh -c 1 -m /a.gguf",
        "sh -c 'exec env LD_LIBRARY_PATH=/lib/x /opt/SERVER'",
        "bash -lc \"source /opt/env.sh > /dev/null && exec /opt/SERVER\"",
        "taskset -c 1 sh -c 'ulimit -l unlimited; X=\"$HOME\"; nice SERVER'",
        "bash -c 'cd /srv && A=1 SERVER'",
        "bash -c 'cd /srv && SERVER >> log 2>&1'",
        "bash -c 'SERVER | tee log'",
        "bash -c 'SERVER -t $(nproc)'",
        "SERVER --mlock=1 2>/dev/null",
    ];
    let all = lines.map(|line| {
        let written = line.replace("SERVER", "llama-server -c 1 -m /a.gguf");
        let told = taken(&written).unwrap_or_else(|why| format!("! {why}"));
        format!("{line}\n    {told}")
    });
    insta::assert_snapshot!(all.join("\n"));
}

#[test]
fn a_command_of_another_program_stays_with_a_port_of_ours() {
    let text = "models:\n  \
        whisper: {cmd: \"nice -n 5 whisper-server -m /w.bin --port 8081\", proxy: \"http://127.0.0.1:8081\", ttl: 60,\n    \
          concurrencyLimit: 2, checkEndpoint: /v1/models, env: [\"A=1\"], cmdStop: stop}\n  \
        vllm: {cmd: \"bash -c 'cd /srv && source venv/bin/activate && vllm serve org/m --port ${PORT}'\", checkEndpoint: none}\n  \
        fixed: {cmd: python app.py, proxy: \"http://localhost:7000\"}\n  root: {cmd: \"sudo whisper-server --port ${PORT}\"}\n  \
        box: {cmd: \"docker run -p ${PORT}:8000 vllm/vllm-openai\"}\n";
    insta::assert_snapshot!(write::render_config(&swap(text).unwrap(), "swap.yaml"));
    assert_eq!(read_back(&swap(text).unwrap()).models[0].1.max_in_flight, Some(2));
}

#[test]
fn what_stands_before_a_server_is_a_wrapper_that_runs_it() {
    let line = "sh -c 'X=$((40 + 2)) && export X && exec /bin/llama-server -m /a.gguf'";
    let words =
        command::parse_command(&shell::split_words(line, "x").unwrap()).unwrap().model.command.wrapper;
    // Run a shell in place of the server, to show the effects of the preamble and the arguments after it.
    let ran = std::process::Command::new(&words[0])
        .args(&words[1..])
        .args(["/bin/sh", "-c", "echo $X $#:$@", "x", "y z"])
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&ran.stdout), "42 1:y z\n", "{words:?}");
}

#[test]
fn what_is_wrong_with_one_model_ends_no_import() {
    let text = "apiKeys: [\"${env.NOT_SET}\"]\npeers: {p: {proxy: \"https://h\", apiKey: \"${env.NOT_SET}\", models: [far]}}\nmodels:\n  \
        good: {cmd: llama-server -m /a.gguf, env: [\"HF_TOKEN=${env.HF_TOKEN}\", \"HOME=${env.HOME}\"]}\n  \
        unset: {cmd: \"llama-server -m ${env.NOT_SET}/a.gguf\"}\n  macro: {cmd: \"llama-server -m ${HOME}/a.gguf\"}\n  \
        empty: {ttl: 5}\n  open: {cmd: \"llama-server -m 'a\"}\n  \
        cloud: {proxy: \"https://api.example/v1\", aliases: [sky], useModelName: big, headers: {Authorization: \"${env.K}\"}, ttl: 5}\n";
    let imported = swap(text).unwrap();
    let left: Vec<String> = imported.unmatched.iter().map(|left| left.describe(usize::MAX)).collect();
    insta::assert_snapshot!(format!(
        "{}\n---\n{}",
        write::render_config(&imported, "swap.yaml"),
        left.join("\n")
    ));
}

#[test]
fn parameters_of_its_own_name_are_nobody_elses() {
    let text = "models:\n  q:\n    cmd: llama-server -m /a.gguf\n    aliases: [other, \"q:low\"]\n    filters:\n      \
        stripParams: seed\n      setParams: {top_k: 1, stream: true, model: x}\n      setParamsByID:\n        \
        q: {temperature: 1}\n        \"${MODEL_ID}:low\": {top_k: 2}\nhooks: {on_startup: {preload: [\"q:low\"]}}\n";
    let imported = swap(text).unwrap();
    insta::assert_snapshot!(write::render_config(&imported, "swap.yaml"));
    let names = &read_back(&imported).settings.names;
    assert!(names["q"].request.set.keys().eq(["temperature"]) && !names.contains_key("other"), "{names:?}");
    assert_eq!(names["q:low"].request.set["top_k"].as_i64(), Some(2));
    // The model has no other names, so the variant becomes part of the model.
    let only = "models:\n  q:\n    cmd: llama-server -m /a.gguf\n    filters: {setParams: {a: 1}, setParamsByID: {q: {a: 2}}}\n";
    let model = swap(only).unwrap().models.remove(0);
    assert!(
        model.requests.names.is_empty() && model.requests.set == [("a".to_owned(), 2.into())],
        "{model:?}"
    );
}

#[test]
fn what_many_models_have_in_common_is_told_once() {
    let models: Vec<String> = (0..72)
        .map(|n| {
            format!(
                "  m{n}:\n    cmd: llama-server -m /a.gguf\n    cmdStop: kill ${{PID}}\n    name: Model {n}\n    unlisted: {}\n    \
                 description: of use\n    metadata: {{n: {n}, none: null}}\n    \
                 capabilities: {{in: [text, smell], out: [text], tools: true, reranker: false, context: 4096, smells: true}}\n",
                n == 1
            )
        })
        .collect();
    let imported = swap(&format!("models:\n{}", models.concat())).unwrap();
    let left: Vec<String> = imported.unmatched.iter().map(|left| left.describe(MAX_SHOWN_MODELS)).collect();
    assert_eq!(
        left,
        [
            "models `m0`, `m1`, `m2` and 69 more: `capabilities.smells`: \
             `listing.capabilities` has `in`, `out`, `tools`, `reranker` and `context`",
            "models `m0`, `m1`, `m2` and 69 more: `cmdStop`: a process gets SIGTERM, and `lifecycle.stop_grace` to end"
        ]
    );
    let text = write::render_config(&imported, "x");
    assert!(text.contains("`m70`, `m71`: `cmdStop`"), "{text}");
    let loaded = read_back(&imported);
    let listing = &loaded.models[1].1.listing;
    assert_eq!((listing.name.as_deref(), listing.hidden), (Some("Model 1"), true));
    assert!(listing.metadata["n"] == 1 && listing.metadata.len() == 1 && listing.capabilities.tools);
    assert_eq!((listing.capabilities.inputs.len(), listing.capabilities.context), (1, Some(4096)));
}

#[test]
fn models_of_peers_have_both_their_names_and_selectors_mean_models() {
    let text = "models:\n  a: {cmd: llama-server -m /a.gguf, aliases: [b]}\npeers:\n  one: {proxy: \"http://h1\", models: [a, x, y]}\n  \
        two: {proxy: \"http://h2\", models: [y]}\nselectors:\n  warm: {strategy: warm, targets: [b, one/x, gone, a], name: Warm}\n  \
        first: {strategy: pin, targets: [x, a]}\n  spill: {strategy: spillover, targets: [a]}\n  \
        none: {strategy: warm, targets: [gone]}\n";
    let imported = swap(text).unwrap();
    insta::assert_snapshot!(write::render_config(&imported, "swap.yaml"));
    assert_eq!(read_back(&imported).settings.remotes["one/a"].model.as_deref(), Some("a"));
}

#[test]
fn keys_before_the_first_section_are_a_model_of_their_own() {
    let imported =
        preset::import_preset("version = 1\nmodel = /a.gguf\nc = 1\n[b]\nmodel = /b.gguf\n", "x").unwrap();
    let models: Vec<_> =
        imported.models.iter().map(|model| (model.name.as_str(), model.command.args.len())).collect();
    assert_eq!(models, [("default", 2), ("b", 0)]);
    // The rest of the value is a comment.
    let text = "[a]\nmodel = /a.gguf\nsamplers = top_k;top_p\nc = 1 ; more\n; x = a;b\nalias =;none\n";
    let imported = preset::import_preset(text, "x").unwrap();
    let left: Vec<_> = imported.unmatched.iter().map(|left| left.setting.as_str()).collect();
    assert_eq!(left, ["`samplers` (line 3)"]);
    // A model's variable overrides the flag for all models.
    let text =
        "[*]\nctx-size = 8192\ncpu-moe = 1\n[b]\nmodel = /b.gguf\nLLAMA_ARG_CTX_SIZE = 1024\ncpu-moe = 0\n";
    let imported = preset::import_preset(text, "x").unwrap();
    assert_eq!(imported.models[0].command.args, ["--ctx-size", "1024"]);
}

#[test]
fn a_router_becomes_its_models_its_folder_and_flags_for_all() {
    let folder = tempfile::tempdir().unwrap();
    let line = "LLAMA_ARG_THREADS=4 nice -n 5 /opt/llama-server --models-preset p.ini --models-dir DIR --models-max 2 \
                --host 0.0.0.0 --port 9000 -ngl 99 --no-models-autoload";
    let words = shell::split_words(&line.replace("DIR", folder.path().to_str().unwrap()), "x").unwrap();
    let read = |file: &str| {
        assert_eq!(file, "p.ini");
        Ok("[*]\nngl = 1\n[in-the-folder]\nc = 4096\n[own]\nmodel = /own.gguf\n".to_owned())
    };
    let imported = router::import_router(&words, "x", &read).unwrap().unwrap();
    let text = write::render_config(&imported, "the command line");
    insta::assert_snapshot!(text.replace(folder.path().to_str().unwrap(), "/models"));
    assert_eq!(read_back(&imported).settings.paths.models, [folder.path()]);
    let without = shell::split_words("llama-server -m /a.gguf", "x").unwrap();
    assert!(router::import_router(&without, "x", &read).unwrap().is_none());
}

#[test]
fn paths_of_windows_stay_and_are_told() {
    let text = "models:\n  w:\n    cmd: |\n      C:\\llama\\llama-server.exe --port ${PORT}\n      -m D:\\m\\a.gguf\n";
    let model = swap(text).unwrap().models.remove(0);
    assert_eq!(model.command.binary.as_deref(), Some("C:\\llama\\llama-server.exe"));
    assert_eq!(model.command.args, ["-m", "D:\\m\\a.gguf"]);
    assert!(model.notes.iter().any(|note| note.contains("/mnt/c/x")), "{:?}", model.notes);
    let model = preset::import_preset("[w]\nmodel = D:\\m\\a.gguf\n", "x").unwrap().models.remove(0);
    assert!(model.command.args[1] == "D:\\m\\a.gguf" && model.notes.len() == 1, "{model:?}");
}

#[test]
fn a_container_with_a_script_of_its_own_and_flags_in_one_word() {
    let taken = |line: &str| command::parse_command(&shell::split_words(line, "x").unwrap());
    let model =
        taken("docker run -v /srv:/m llama.cpp:server --model=/m/a.gguf --mmproj=/m/p.gguf").unwrap().model;
    assert_eq!(
        (model.model.as_deref(), model.command.args.join(" ")),
        (Some("/srv/a.gguf"), "--mmproj /srv/p.gguf".into())
    );
    let why = taken("docker run own/llama-image --alias x").unwrap_err();
    assert!(why.contains("no model is given to the image `own/llama-image`"), "{why}");
}

#[test]
fn what_a_file_is_is_seen_by_its_name_and_its_first_line() {
    for (name, text, source) in [
        ("a.yaml", "", ImportFormat::LlamaSwap),
        ("a.ini", "", ImportFormat::Preset),
        ("a", "# x\nmodels:\n", ImportFormat::LlamaSwap),
        ("a", "; x\n[*]\n", ImportFormat::Preset),
        ("a", "version = 1\n", ImportFormat::Preset),
        ("a", "#!/bin/sh\nexec llama-server -m a\n", ImportFormat::Command),
        ("a", "A=1 llama-server -m a\n", ImportFormat::Command),
        ("a", "docker run image\n", ImportFormat::Command),
    ] {
        assert_eq!(guess_format(Path::new(name), text), source, "{name}: {text}");
    }
}

#[test]
fn the_settings_of_another_page_name_ours() {
    let imported = swap("ui: {title: home}\nmodels:\n  a: {cmd: llama-server -m /a.gguf}\n").unwrap();
    let left: Vec<String> = imported.unmatched.iter().map(|left| left.describe(usize::MAX)).collect();
    let [left] = left.as_slice() else { panic!("{left:?}") };
    assert!(left.contains("the page for operators") && !left.contains("no page"), "{left}");
    let (_, file) = left.rsplit_once('(').unwrap();
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(file.trim_end_matches(')'));
    assert!(docs.is_file(), "{}", docs.display());
}
