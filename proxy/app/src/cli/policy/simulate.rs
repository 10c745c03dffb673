//! `llama-warden policy simulate`: simulates a leaking backend under a policy, without a policy, and with a
//! restart after a number of requests. [`warden_policies::simulate`] computes the numbers.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use serde_json::json;
use warden_config::source::policy_file::load_policy;
use warden_policies::defaults::parse_duration;
use warden_policies::growth::WorkUnit;
use warden_policies::recycle::GrowthMode;
use warden_policies::schedule::DayWindows;
use warden_policies::simulate::{
    SimulatedPolicy, SimulationReport, SimulationScenario, StrategyOutcome, compare,
};
use warden_policies::units::as_f64;
use warden_policies::world::{MemoryBackground, SimulatedWorld, WorldLeak, WorldLoad};
use warden_policies::{ByteSize, MemoryLimit, phrases};

use crate::cli::shared::ConfigArgs;
use crate::exit::CommandError;
use crate::out;

use super::replay::find_model;

/// More requests take minutes and add no information.
const MAX_REQUESTS: f64 = 2_000_000.0;

#[derive(Debug, Args)]
pub(crate) struct SimulateArgs {
    /// Host memory that leaks per unit of work; 0 for none.
    #[arg(long, value_name = "SIZE", default_value = "4MiB")]
    leak: ByteSize,
    /// VRAM that leaks per unit of work.
    #[arg(long, value_name = "SIZE", default_value = "0")]
    vram_leak: ByteSize,
    /// Unit of work that leaks.
    #[arg(long, value_name = "UNIT", default_value = "request")]
    per: LeakUnitArg,
    /// Number of requests per hour.
    #[arg(long, value_name = "N", default_value_t = 360.0, value_parser = parse_positive)]
    requests_per_hour: f64,
    /// Arrival pattern of requests.
    #[arg(long, value_name = "PATTERN", default_value = "random")]
    pattern: ArrivalPattern,
    /// Share of requests with an image, 0 to 1.
    #[arg(long, value_name = "SHARE", default_value_t = 0.25, value_parser = parse_share)]
    images: f64,
    /// Times of the day without requests, like `22:00-06:00`.
    #[arg(long, value_name = "TIMES", default_value = "")]
    asleep: String,
    /// Host memory of a fresh process.
    #[arg(long, value_name = "SIZE", default_value = "400MiB")]
    fresh: ByteSize,
    /// Host memory at which a process fails.
    #[arg(long, value_name = "SIZE", default_value = "8GiB")]
    memory: ByteSize,
    /// VRAM of a fresh process. Default: no GPU.
    #[arg(long, value_name = "SIZE")]
    fresh_vram: Option<ByteSize>,
    /// VRAM at which a process fails.
    #[arg(long, value_name = "SIZE", default_value = "24GiB")]
    gpu_memory: ByteSize,
    /// Size of a prompt cache, which fills up and is declared.
    #[arg(long, value_name = "MIB", default_value_t = 0)]
    cache_ram: u64,
    /// Time from the start of a process to its first answer.
    #[arg(long, value_name = "TIME", default_value = "20s", value_parser = parse_duration)]
    load_time: Duration,
    /// Time from the beginning of an answer to its end.
    #[arg(long, value_name = "TIME", default_value = "4s", value_parser = parse_duration)]
    service: Duration,
    /// Starts the next process before the old one drains.
    #[arg(long)]
    overlap: bool,
    /// Hours to simulate.
    #[arg(long, value_name = "N", default_value_t = 72.0, value_parser = parse_positive)]
    hours: f64,
    /// Restarts after this many requests, for comparison. Default: half of a process's lifetime without a
    /// policy.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    every: Option<u64>,
    /// Seed of the random numbers: the same seed gives the same result.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// TOML file with the keys of a model's `policy`. Default without --model: growth recycles, budgets are
    /// 80 % and 92 %.
    #[arg(long, value_name = "FILE")]
    policy: Option<PathBuf>,
    /// Uses the policy of this model of the configuration.
    #[arg(long, value_name = "NAME", conflicts_with = "policy")]
    model: Option<String>,
    /// Prints JSON, for programs.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    config: ConfigArgs,
}

/// Unit of work.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum LeakUnitArg {
    /// Each request.
    Request,
    /// Each prompt token.
    PromptToken,
    /// Each output token.
    OutputToken,
    /// Each image.
    Image,
    /// Each hour.
    Hour,
}

impl From<LeakUnitArg> for WorkUnit {
    fn from(arg: LeakUnitArg) -> Self {
        match arg {
            LeakUnitArg::Request => Self::Request,
            LeakUnitArg::PromptToken => Self::PromptToken,
            LeakUnitArg::OutputToken => Self::OutputToken,
            LeakUnitArg::Image => Self::Image,
            LeakUnitArg::Hour => Self::Hour,
        }
    }
}

/// Arrival pattern of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ArrivalPattern {
    /// In equal intervals.
    Steady,
    /// At random, with pauses of all lengths.
    Random,
}

fn parse_positive(text: &str) -> Result<f64, String> {
    let number: f64 = text.parse().map_err(|_| "a number is needed".to_owned())?;
    if number > 0.0 && number < 1e6 { Ok(number) } else { Err("a number above 0 is needed".to_owned()) }
}

fn parse_share(text: &str) -> Result<f64, String> {
    let number: f64 = text.parse().map_err(|_| "a number is needed".to_owned())?;
    if (0.0..=1.0).contains(&number) { Ok(number) } else { Err("a number from 0 to 1 is needed".to_owned()) }
}

pub(crate) fn run(args: &SimulateArgs) -> Result<(), CommandError> {
    let scenario = args.scenario()?;
    let (policy, words) = args.policy()?;
    let report = compare(&scenario, &policy, args.every);
    if args.json {
        out::print_json(&args.as_json(&scenario, &words, &report))
    } else {
        out::print_text(&text(args, &words, &report))
    }
}

impl SimulateArgs {
    fn scenario(&self) -> Result<SimulationScenario, CommandError> {
        let asleep: DayWindows = if self.asleep.is_empty() {
            DayWindows::ALWAYS
        } else {
            let wrong = |error: warden_policies::schedule::WindowError| {
                CommandError::usage(format!("--asleep: {error}"), "write it like `--asleep 22:00-06:00`")
            };
            self.asleep.parse().map_err(wrong)?
        };
        let awake = if asleep == DayWindows::ALWAYS {
            1.0
        } else {
            let day = warden_policies::schedule::DAY_MINUTES;
            f64::from(day - asleep.open_minutes()) / f64::from(day)
        };
        let requests = (self.hours * awake * self.requests_per_hour).round();
        if !(1.0..=MAX_REQUESTS).contains(&requests) {
            return Err(CommandError::usage(
                format!("{requests} requests are to be simulated: it is from 1 to {MAX_REQUESTS}"),
                "change --hours or --requests-per-hour",
            ));
        }
        if self.fresh >= self.memory || self.fresh_vram.is_some_and(|fresh| fresh >= self.gpu_memory) {
            return Err(CommandError::usage(
                "a fresh process would not fit into the memory",
                "--fresh has to be below --memory, and --fresh-vram below --gpu-memory",
            ));
        }
        let leak =
            |size: ByteSize| (size.0 > 0).then(|| WorldLeak::per_unit(self.per.into(), as_f64(size.0)));
        let cache = ByteSize::mib(self.cache_ram);
        let mut world = SimulatedWorld::quiet(self.seed);
        world.host = self.fresh.0;
        world.vram = self.fresh_vram.map(|size| size.0);
        world.leaks.extend(leak(self.leak));
        // A CUDA pool grows by 2 MiB at a time.
        world.vram_leaks.extend(leak(self.vram_leak).map(|leak| WorldLeak { step: 2 << 20, ..leak }));
        if cache.0 > 0 {
            world
                .backgrounds
                .push(MemoryBackground::Cache { per_request: 16.0 * 1024.0 * 1024.0, cap: as_f64(cache.0) });
        }
        world.load = WorldLoad {
            per_second: self.requests_per_hour / 3600.0,
            steady: self.pattern == ArrivalPattern::Steady,
            images: self.images,
            ..WorldLoad::default()
        };
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "checked to be a whole number from 1 to two millions"
        )]
        let requests = requests as u64;
        Ok(SimulationScenario {
            world,
            requests,
            memory: self.memory.0,
            device: self.gpu_memory.0,
            load_time: self.load_time,
            service: self.service,
            overlap: self.overlap,
            asleep,
            allowance: cache.0,
        })
    }

    fn policy(&self) -> Result<(SimulatedPolicy, String), CommandError> {
        let (_, loaded) = self.config.read()?;
        // Percentages refer to the simulated machine's memory.
        let growth = loaded.settings.growth.clone();
        let of = |policy: &warden_config::policy::PolicyConfig| SimulatedPolicy {
            recycle: policy.to_recycle_policy(None),
            growth: growth.clone(),
        };
        Ok(match (&self.policy, &self.model) {
            (Some(file), _) => (of(&load_policy(file)?), format!("of {}", file.display())),
            (None, Some(name)) => (of(&find_model(&loaded, name)?.1.policy), format!("of model {name}")),
            (None, None) => {
                let mut policy = of(&loaded.defaults.policy);
                let soft = Some(MemoryLimit::Percent(80.0));
                let hard = Some(MemoryLimit::Percent(92.0));
                let recycle = &mut policy.recycle;
                recycle.common.growth = GrowthMode::Recycle;
                (recycle.host_soft, recycle.host_hard) = (soft, hard);
                (recycle.vram_soft, recycle.vram_hard) = (soft, hard);
                (policy, "growth = \"recycle\", soft budgets \"80%\", hard budgets \"92%\"".to_owned())
            }
        })
    }

    fn as_json(
        &self,
        scenario: &SimulationScenario,
        policy: &str,
        report: &SimulationReport,
    ) -> serde_json::Value {
        let unit: WorkUnit = self.per.into();
        json!({
            "scenario": {
                "leak_bytes": self.leak.0,
                "vram_leak_bytes": self.vram_leak.0,
                "per": unit.as_str(),
                "requests": scenario.requests,
                "requests_per_hour": self.requests_per_hour,
                "memory_bytes": self.memory.0,
                "load_seconds": self.load_time.as_secs_f64(),
                "seed": self.seed,
            },
            "this_policy": policy,
            "policy": report.policy,
            "no_policy": report.nothing,
            "every": report.counter,
            "out_of_memory_avoided": report.avoided,
            "out_of_memory_caused": report.caused,
        })
    }
}

fn text(args: &SimulateArgs, policy: &str, report: &SimulationReport) -> String {
    let counter = report.counter.as_ref();
    let every = counter
        .map_or_else(|| "restart every N requests".to_owned(), |one| format!("restart {}", one.strategy));
    let row = |name: &str, of: &dyn Fn(&StrategyOutcome) -> String| {
        vec![
            name.to_owned(),
            of(&report.policy),
            of(&report.nothing),
            counter.map_or_else(|| "-".to_owned(), of),
        ]
    };
    let rows = [
        row("restarts", &restarts_text),
        row("minutes waited", &|one| format!("{:.1}", one.waited_minutes)),
        row("requests that waited", &|one| one.waited.to_string()),
        row("out of memory", &|one| one.out_of_memory.to_string()),
        row("requests failed", &|one| one.failed.to_string()),
    ];
    let unit: WorkUnit = args.per.into();
    let mut leaks = Vec::new();
    for (memory, size) in [("host memory", args.leak), ("VRAM", args.vram_leak)] {
        if size.0 > 0 {
            leaks.push(format!("{size} of {memory} for each {}", unit.noun()));
        }
    }
    let leaks = if leaks.is_empty() { "no leak".to_owned() } else { leaks.join(" and ") };
    let mut text = format!(
        "{} requests in {:.1} hours; {leaks}; {} from start to ready\npolicy: {policy}\n\n{}",
        report.policy.requests,
        report.policy.hours,
        phrases::time_phrase(args.load_time.as_secs_f64()),
        out::table(["", "this policy", "no policy", &every], rows)
    );
    for held in &report.policy.held {
        text.extend([format!("\nthe policy held back: {held}\n")]);
    }
    text.extend([format!(
        "\nout of memory: {} without a policy, {} with it",
        times_text(report.nothing.out_of_memory),
        report.policy.out_of_memory
    )]);
    if report.caused > 0 {
        text.extend([format!(", of which {} by replacements themselves", report.caused)]);
    }
    text.push('\n');
    if counter.is_none() {
        text.push_str(
            "memory never runs out without a policy, so there is nothing to count requests for: give --every\n",
        );
    }
    text
}

fn restarts_text(outcome: &StrategyOutcome) -> String {
    if outcome.reasons.is_empty() {
        return outcome.restarts.to_string();
    }
    let reasons: Vec<String> =
        outcome.reasons.iter().map(|(reason, count)| format!("{reason} {count}")).collect();
    format!("{} ({})", outcome.restarts, reasons.join(", "))
}

fn times_text(count: u64) -> String {
    format!("{count} {}", if count == 1 { "time" } else { "times" })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct SimulateTestCli {
        #[command(flatten)]
        args: SimulateArgs,
    }

    fn args(words: &[&str]) -> SimulateArgs {
        SimulateTestCli::parse_from(std::iter::once(&"simulate").chain(words)).args
    }

    #[test]
    fn a_policy_is_shown_beside_none_and_beside_a_count() {
        let outcome = |strategy: &str, restarts, out_of_memory| StrategyOutcome {
            strategy: strategy.to_owned(),
            requests: 43_200,
            hours: 72.0,
            restarts,
            out_of_memory,
            failed: out_of_memory * 5,
            waited_minutes: 1.25,
            waited: 17,
            ..StrategyOutcome::default()
        };
        let policy = StrategyOutcome {
            reasons: vec![("growth".to_owned(), 10), ("host_soft".to_owned(), 2)],
            held: vec!["the last replacement was too recent".to_owned()],
            ..outcome("policy", 12, 0)
        };
        let report = SimulationReport {
            nothing: outcome("nothing", 3, 3),
            counter: Some(outcome("every 7200 requests", 6, 1)),
            policy,
            avoided: 3,
            caused: 1,
        };
        let both = args(&["--leak", "1MiB", "--vram-leak", "2MiB", "--per", "image"]);
        let none = SimulationReport {
            nothing: outcome("nothing", 0, 0),
            counter: None,
            caused: 0,
            ..report.clone()
        };
        let told = [text(&both, "of model m", &report), text(&args(&["--leak", "0"]), "of a.toml", &none)];
        let refused = [["--fresh", "1TiB"], ["--hours", "0.0001"], ["--asleep", "2-5"]]
            .map(|wrong| args(&wrong).scenario().unwrap_err().lines().join("\n"));
        insta::assert_snapshot!([told.join("\n---\n"), refused.join("\n")].join("\n"));
    }
}
