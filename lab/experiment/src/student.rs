//! Student's distribution: the distribution of a mean whose scatter is estimated from few values.
//!
//! Implemented here because the crate `statrs` has 32,000 lines and panics on arguments out of range. The
//! functions of this module clamp such arguments.

/// Returns the probability that a Student variable with `freedom` degrees of freedom exceeds `t`. `freedom`
/// may be fractional; a value below one counts as one.
pub(super) fn upper_tail(t: f64, freedom: f64) -> f64 {
    let freedom = freedom.max(1.0);
    if t.is_nan() {
        return 1.0;
    }
    let half = 0.5 * incomplete_beta(freedom / 2.0, 0.5, freedom / (freedom + t * t));
    if t >= 0.0 { half } else { 1.0 - half }
}

/// Returns the value that is exceeded with probability `chance`, at most 0.5; relative error at most a
/// millionth.
pub(super) fn quantile(chance: f64, freedom: f64) -> f64 {
    let chance = chance.clamp(1e-12, 0.5);
    let (mut low, mut high) = (0.0, 1.0);
    while upper_tail(high, freedom) > chance {
        low = high;
        high *= 4.0;
    }
    while high - low > 1e-7 * high {
        let middle = f64::midpoint(low, high);
        if upper_tail(middle, freedom) > chance { low = middle } else { high = middle }
    }
    f64::midpoint(low, high)
}

/// Regularised incomplete beta function, as a continued fraction after Lentz (*Numerical Recipes*, 6.4).
fn incomplete_beta(a: f64, b: f64, x: f64) -> f64 {
    if x <= 0.0 {
        return 0.0;
    }
    if x >= 1.0 {
        return 1.0;
    }
    let front = (ln_gamma(a + b) - ln_gamma(a) - ln_gamma(b) + a * x.ln() + b * (1.0 - x).ln()).exp();
    if x < (a + 1.0) / (a + b + 2.0) {
        front * beta_fraction(a, b, x) / a
    } else {
        1.0 - front * beta_fraction(b, a, 1.0 - x) / b
    }
}

fn beta_fraction(a: f64, b: f64, x: f64) -> f64 {
    let safe = |value: f64| if value.abs() < 1e-300 { 1e-300 } else { value };
    let mut top = 1.0;
    let mut bottom = 1.0 / safe(1.0 - (a + b) * x / (a + 1.0));
    let mut all = bottom;
    for step in 1..200_u32 {
        let nth = f64::from(step);
        let even = nth * (b - nth) * x / ((a + 2.0 * nth - 1.0) * (a + 2.0 * nth));
        let odd = -(a + nth) * (a + b + nth) * x / ((a + 2.0 * nth) * (a + 2.0 * nth + 1.0));
        let mut change = 1.0;
        for part in [even, odd] {
            bottom = 1.0 / safe(1.0 + part * bottom);
            top = safe(1.0 + part / top);
            change = top * bottom;
            all *= change;
        }
        if (change - 1.0_f64).abs() < 1e-13 {
            break;
        }
    }
    all
}

/// Logarithm of the gamma function for positive numbers, after Lanczos, with Godfrey's coefficients for g =
/// 7.
fn ln_gamma(x: f64) -> f64 {
    const PARTS: [f64; 8] = [
        676.520_368_121_885_1,
        -1_259.139_216_722_402_8,
        771.323_428_777_653_1,
        -176.615_029_162_140_6,
        12.507_343_278_686_905,
        -0.138_571_095_265_720_12,
        9.984_369_578_019_572e-6,
        1.505_632_735_149_311_6e-7,
    ];
    let x = x - 1.0;
    let mut sum = 0.999_999_999_999_809_9;
    let mut at = x;
    for part in PARTS {
        at += 1.0;
        sum += part / at;
    }
    let t = x + 7.5;
    0.5 * std::f64::consts::TAU.ln() + (x + 0.5) * t.ln() - t + sum.ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_the_tables() {
        // One degree: the tangent. Two: (1 - 2p) / sqrt(2p(1 - p)). Others: Abramowitz and Stegun, table
        // 26.10.
        for (chance, freedom, value) in [
            (0.25, 1.0, 1.0),
            (0.000_625, 1.0, 509.295_5),
            (0.01, 2.0, 6.964_557),
            (0.005, 4.0, 4.604_095),
            (0.025, 10.0, 2.228_139),
            (0.000_5, 30.0, 3.645_959),
            (0.025, 1e7, 1.959_964),
        ] {
            let found = quantile(chance, freedom);
            assert!((found / value - 1.0).abs() < 2e-5, "{chance} {freedom}: {found}");
            assert!((upper_tail(found, freedom) / chance - 1.0).abs() < 1e-5);
        }
        assert!(quantile(0.5, 3.0).abs() < 1e-6);
        assert!((upper_tail(-1.0, 1.0) - 0.75).abs() < 1e-9);
        let (low, middle, high) = (quantile(0.01, 3.0), quantile(0.01, 2.5), quantile(0.01, 2.0));
        assert!(low < middle && middle < high);
    }
}
