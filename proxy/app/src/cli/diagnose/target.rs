//! The server of an experiment: a configured model with all its settings, or a command line. `--binary` and
//! `--build` run another program with the same model.

use std::path::Path;

use warden_config::machine::HostMachine;
use warden_config::problem::ConfigPlace;
use warden_config::resolve::ResolvedConfig;
use warden_config::resolve::binary::BinaryChoice;
use warden_diagnose::ExperimentSetup;
use warden_supervisor::spec::SharedSpec;
use warden_supervisor::{ModelSpec, SoloSpec};

use super::DiagnoseArgs;
use crate::cli::serve;
use crate::exit::CommandError;
use crate::serve::ConfigSource;

#[derive(Debug)]
pub(crate) struct DiagnoseTarget {
    pub(crate) spec: SoloSpec,
    /// Build number and build id, if known.
    pub(crate) server: String,
    chosen_by: Option<&'static str>,
    pub(crate) resolved: ResolvedConfig,
    /// Index of the model in `resolved`.
    pub(crate) index: usize,
}

impl DiagnoseTarget {
    /// Runs the binary once to check the configuration.
    pub(crate) async fn find(args: &DiagnoseArgs, machine: &HostMachine) -> Result<Self, CommandError> {
        Self::find_with_program(args, machine, program(args, machine), None).await
    }

    pub(crate) fn configured(
        args: &DiagnoseArgs,
        machine: &HostMachine,
    ) -> Result<(ResolvedConfig, usize), CommandError> {
        let resolved = configuration_plan(args, machine)?.as_configured(machine)?;
        let index = find_model(args.model.as_deref(), &resolved)?;
        Ok((resolved, index))
    }

    /// With `program`, runs that program instead of the configured one. Also searches `other_store` for
    /// builds.
    pub(crate) async fn find_with_program(
        args: &DiagnoseArgs,
        machine: &HostMachine,
        chosen: Option<(&'static str, BinaryChoice)>,
        other_store: Option<&Path>,
    ) -> Result<Self, CommandError> {
        let chosen_by = chosen.as_ref().map(|(flag, _)| *flag);
        let mut index = 0;
        let plan = configuration_plan(args, machine)?;
        let resolving = plan.resolve_with(machine, |resolved| {
            index = find_model(args.model.as_deref(), resolved)?;
            resolved.other_store = other_store.map(Path::to_owned);
            if let Some((flag, choice)) = chosen {
                resolved.models[index].choice = choice;
                resolved.models[index].choice_place = ConfigPlace::Flag(format!("flag {flag}"));
            }
            Ok(())
        });
        let resolved = resolving.await?;
        let spec = &resolved.fleet.models[index];
        let facts = resolved.models[index].build.as_ref();
        let number = facts.and_then(|facts| facts.number).map(|number| format!("b{number}"));
        let build = facts
            .and_then(|facts| facts.provenance.as_ref())
            .map(|provenance| format!("build {}", provenance.id));
        let server = number.into_iter().chain(build).collect::<Vec<_>>().join(", ");
        Ok(Self { spec: solo_spec(spec), server, chosen_by, resolved, index })
    }

    pub(crate) fn model(&self) -> &SharedSpec {
        &self.resolved.fleet.models[self.index]
    }

    pub(crate) fn name(&self) -> &str {
        self.model().name.as_str()
    }

    pub(crate) fn program_line(&self) -> String {
        let known = if self.server.is_empty() { String::new() } else { format!(" ({})", self.server) };
        let by = self.chosen_by.map_or_else(String::new, |flag| format!(", chosen by {flag}"));
        format!("{}: {}{known}{by}", self.name(), self.spec.command.binary.display())
    }

    pub(crate) fn about(&self, began: String, machine: &HostMachine) -> ExperimentSetup {
        let about = ExperimentSetup {
            warden: env!("CARGO_PKG_VERSION").to_owned(),
            began,
            model: self.name().to_owned(),
            server: self.server.clone(),
            ..ExperimentSetup::default()
        };
        about.with_command(&self.spec.command).with_inherited(&machine.text_vars(), &self.spec.command)
    }
}

fn configuration_plan(args: &DiagnoseArgs, machine: &HostMachine) -> Result<ConfigSource, CommandError> {
    let any_name = !args.flags.is_empty();
    if !any_name && args.config.config.is_none() && args.models_dir.is_empty() {
        return Err(CommandError::usage(
            "nothing to diagnose: neither --config nor llama-server's flags are given",
            "use `llama-warden diagnose -- -m model.gguf`, `llama-warden diagnose --models-dir DIR --model NAME` or \
             `llama-warden diagnose --config warden.toml --model NAME`",
        ));
    }
    let mut flags = if any_name { serve::dropin_settings(&args.flags, machine)? } else { Vec::new() };
    flags.extend(serve::model_folders(&args.models_dir));
    Ok(ConfigSource { config: args.config.clone(), flags, any_name })
}

fn program(args: &DiagnoseArgs, machine: &HostMachine) -> Option<(&'static str, BinaryChoice)> {
    let Some(binary) = &args.binary else {
        return Some(("--build", BinaryChoice::Build(args.build.clone()?)));
    };
    Some(("--binary", typed_program(binary, machine)))
}

pub(super) fn solo_spec(model: &SharedSpec) -> SoloSpec {
    SoloSpec {
        command: model.command.clone(),
        oom_score_adj: model.oom_score_adj,
        socket: model.run.socket,
        facts: model.facts,
    }
}

/// Resolves the path relative to the working directory. Searches PATH for a bare word that is no file, like a
/// shell.
pub(super) fn typed_program(binary: &Path, machine: &HostMachine) -> BinaryChoice {
    let path = machine.cwd.join(binary);
    let bare = binary.components().count() == 1 && !path.is_file();
    if bare { BinaryChoice::InPath(binary.to_owned()) } else { BinaryChoice::Path(path) }
}

/// Refuses a model that another program serves: all experiments send requests of llama-server's own routes.
fn find_model(name: Option<&str>, resolved: &ResolvedConfig) -> Result<usize, CommandError> {
    let index = find_named(name, resolved)?;
    let spec = &resolved.fleet.models[index];
    if spec.command.kind.is_llama_server() {
        return Ok(index);
    }
    Err(CommandError::usage(
        format!("model `{}` is served by its own `command`, not by llama-server", spec.name),
        "choose a llama-server with `--model`; `llama-warden status` shows the growth of every model",
    ))
}

fn find_named(name: Option<&str>, resolved: &ResolvedConfig) -> Result<usize, CommandError> {
    let models = &resolved.fleet.models;
    let all = || models.iter().map(|spec| spec.name.as_str()).collect::<Vec<_>>().join(", ");
    let is = |spec: &ModelSpec, name: &str| {
        spec.name.as_str() == name || spec.aliases.iter().any(|alias| alias == name)
    };
    match name {
        Some(name) => models.iter().position(|spec| is(spec, name)).ok_or_else(|| {
            CommandError::usage(format!("there is no model `{name}`"), format!("the models are: {}", all()))
        }),
        None if models.len() == 1 => Ok(0),
        None => Err(CommandError::usage(
            "the configuration has several models",
            format!("choose one with `--model`: {}", all()),
        )),
    }
}
